"""The names of the acceptance rules, in a module of their own: it does not import numpy."""

from typing import Literal, TypeAlias

__all__ = ["AcceptanceName"]

AcceptanceName: TypeAlias = Literal["coupled", "rejection", "lossy_typical"]
