"""The names of the acceptance rules. Apart from them, so that a config can be read without numpy."""

from typing import Literal, TypeAlias

__all__ = ["AcceptanceName"]

AcceptanceName: TypeAlias = Literal["coupled", "rejection", "lossy_typical"]
