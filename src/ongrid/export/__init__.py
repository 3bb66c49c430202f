"""Files and what is proved of them: reads artifacts, never live models."""

from ongrid.export.verify import Claim, Verification, verify

__all__ = ["Claim", "Verification", "verify"]
