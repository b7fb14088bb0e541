"""Environments that do what their answers say, for the tests of limits."""

import os
import time
from dataclasses import dataclass

import numpy as np

from rollwise.errors import ConfigError
from rollwise.tasks.environment import LanguageEnvironment, Outcome


@dataclass(kw_only=True, eq=False)
class Misbehaving(LanguageEnvironment):
    """Hangs, dies or raises when told to; else says how many answers it has had and a random number."""

    random_from: str = "seed"

    name = "misbehaving"
    has_pictures = True

    @property
    def instructions(self):
        return "Say anything."

    def draw_spec(self, level, rng):
        raise ConfigError(f"no level {level!r}")

    def _begin(self, spec):
        self.answers = 0
        if "refuse" in spec:
            raise ConfigError("this spec is refused")
        return self._obey(spec.get("do", "nothing"))

    def _play(self, answer):
        self.answers += 1
        return Outcome(self._obey(answer), 1.0, done=answer == "end")

    def _obey(self, answer):
        if answer == "hang":
            while True:  # holds the interpreter's lock most of the time, as a busy step would
                pass
        if answer == "sleep":
            time.sleep(3600)
        if answer == "die":
            os._exit(3)
        if answer == "raise":
            raise RuntimeError("broken")
        number = self.np_random.random() if self.random_from == "seed" else time.monotonic()
        return self._observe(f"{self.answers} {number}")

    def _picture(self):
        return np.full((64, 64, 3), self.answers, np.uint8)
