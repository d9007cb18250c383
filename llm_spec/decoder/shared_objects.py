"""Base of objects that decoders share by being given the same one: a budget, a limit."""

from __future__ import annotations

from typing import ClassVar, NoReturn, Self

from llm_spec.contract.errors import ConfigError

__all__ = ["SharedByDecoders"]


class SharedByDecoders:
    """Copying a config shares this object, because two of it would allow twice as much.

    No other process can share it.
    """

    _config_field: ClassVar[str]  # its name in SpeculativeConfig

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise ConfigError(
            f"SpeculativeConfig.{self._config_field} is shared by the decoders of one process and cannot be pickled; "
            f"pickle dataclasses.replace(config, {self._config_field}=None), and give each process one of its own"
        )
