"""Every error that `ongrid` raises on purpose.

An error says where, what was expected and found, and what to do. Its data is kept as
attributes, so that a caller never parses a message.
"""

from __future__ import annotations

from collections.abc import Sequence


class OngridError(Exception):
    """Base of all deliberate errors: `where` (a module path, a file, a rule), `what`, `remedy`."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what, where, remedy)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  {self.remedy}" if self.remedy else head

    def at(self, where: str) -> OngridError:
        """The same error, located: the lower layers know what is wrong, the callers know where."""
        if not self.where:
            self.where = where
        return self


class GridError(OngridError):
    """A number format cannot hold what it is asked to hold."""


class PackingError(OngridError):
    """Codes do not fit the width or the layout that they are packed into."""


class ConfigError(OngridError):
    """A settings object was given unknown, missing or wrongly typed fields."""


class RecipeError(OngridError):
    """A recipe does not parse, or does not fit the model that it is resolved against."""


class StructureError(OngridError):
    """A model is not built in a way that can be walked layer by layer exactly."""


class CalibrationError(OngridError):
    """Calibration data or statistics are missing, malformed or insufficient."""


class NonFiniteError(OngridError):
    """A NaN or an infinity where only finite numbers are right."""


class TrainingError(OngridError):
    """Training would not, or did not, train what it is meant to."""


class StoreError(OngridError):
    """A file or a folder is missing, damaged, inconsistent or not writable."""


class ResumeError(OngridError):
    """An artifact was begun under other conditions than those it would be continued under."""


class VerifyError(OngridError):
    """A proof failed: two things that must be identical are not."""


class MergeMismatch(VerifyError):
    """A merged matrix is not, bit for bit, the one that training multiplied with."""


class Problems(OngridError):
    """Several independent problems, found together and shown together."""

    def __init__(self, problems: Sequence[OngridError]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            f"{len(self.problems)} problems:\n" + "\n".join(f"- {p}" for p in problems)
        )


def raise_all(problems: Sequence[OngridError]) -> None:
    """Raises nothing for none, the error itself for one, `Problems` for several."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise Problems(problems)
