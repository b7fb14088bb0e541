"""Finding the checkpoint to go on from."""

from __future__ import annotations

import json
import logging
import os

from rollwise.files import checkpoint_folders

logger = logging.getLogger(__name__)


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of a run that was saved to its end; None if there is none.

    transformers writes `trainer_state.json` last, and the trainer writes the scheduler's state first: where that file
    is whole, so is the checkpoint. One whose saving was interrupted is passed over with a warning.
    """
    for path in checkpoint_folders(output_dir):
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
            logger.warning("%s is left out: its saving was interrupted.", path)
        else:
            return str(path)
    return None
