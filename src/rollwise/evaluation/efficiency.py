"""Accuracy and length in one number: the Accuracy-Efficiency Score."""

from __future__ import annotations

import math
from dataclasses import dataclass

BETA_GAIN = 3.0
"""Weight of a relative gain in accuracy in AES."""

BETA_LOSS = 5.0
"""Weight of a relative loss in accuracy in AES."""


@dataclass(frozen=True)
class Aes:
    """An Accuracy-Efficiency Score; see `aes`.

    Attributes:
        value: The score; None where it is undefined.
        undefined_because: The reason; None where it is defined.
        length_saving: dL; None where the reference has no length.
        accuracy_gain: dAcc; None where it is undefined.
    """

    value: float | None
    undefined_because: str | None
    length_saving: float | None
    accuracy_gain: float | None


def aes(length: float, accuracy: float, reference_length: float, reference_accuracy: float) -> Aes:
    """Return the Accuracy-Efficiency Score of a model against a reference (Luo et al., arXiv 2501.12570).

    AES = dL + beta * dAcc, with dL = (L_ref - L) / L_ref, dAcc = (Acc - Acc_ref) / Acc_ref, and beta = 3 where
    dAcc >= 0, else 5: shorter and more accurate are good, and a loss in accuracy weighs more than a gain.

    Args:
        length: Mean tokens of a sample, L.
        accuracy: Mean accuracy in [0, 1], Acc.
        reference_length: The reference's L.
        reference_accuracy: The reference's Acc.

    Returns:
        The score. Undefined, with the reason, where the reference is never right or has no length: a relative change
        from 0 is not a number.
    """
    saving = (reference_length - length) / reference_length if reference_length > 0 else None
    if saving is None:
        return Aes(None, f"the reference's mean length is {reference_length:g} tokens", None, None)
    if not all(map(math.isfinite, (saving, accuracy, reference_accuracy))):
        return Aes(None, "a length or an accuracy is not known", None, None)
    if reference_accuracy <= 0:
        return Aes(None, f"the reference's accuracy is {reference_accuracy:g}", saving, None)
    gain = (accuracy - reference_accuracy) / reference_accuracy
    return Aes(aes_score(saving, gain), None, saving, gain)


def aes_score(length_saving: float, accuracy_gain: float) -> float:
    """Return AES = dL + beta * dAcc from its two relative changes, beta = 3 where dAcc >= 0, else 5."""
    return length_saving + (BETA_GAIN if accuracy_gain >= 0 else BETA_LOSS) * accuracy_gain
