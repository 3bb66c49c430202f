"""A text that every Python carries: its own documentation topics.

Enough to calibrate and score a small model on a machine without network. It differs a little
between patch releases of Python, so figures on it are compared within one machine and never written
down.
"""

from __future__ import annotations

NAME = "pydoc"
"""Stands for this text wherever a text file is expected."""

_CALIBRATION_SHARE = 0.8


def calibration_text() -> str:
    """The first 80 % of the text."""
    text = _whole()
    return text[: int(_CALIBRATION_SHARE * len(text))]


def scoring_text() -> str:
    """The last 20 % of the text, which `calibration_text` does not contain."""
    text = _whole()
    return text[int(_CALIBRATION_SHARE * len(text)) :]


def _whole() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
