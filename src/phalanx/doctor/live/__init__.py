"""Why a running engine is slow: a picture of it, and rules that judge it."""

from phalanx.doctor.live.picture import Picture, picture_of
from phalanx.doctor.live.rules import causes_of, findings_of

__all__ = ["Picture", "causes_of", "findings_of", "picture_of"]
