"""Why a running engine is slow: a picture of it, and rules that judge it."""

from phalanx.doctor.live.picture import Picture, picture_of
from phalanx.doctor.live.rules import findings_of

__all__ = ["Picture", "findings_of", "picture_of"]
