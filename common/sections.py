"""What the sections of the fleet file are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of every section of the fleet file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def host_port(value: str) -> str:
    """An address that can be dialled."""
    if value and not value.startswith("unix:"):
        host, _, port = value.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{value!r} is not HOST:PORT")
    return value


Address = Annotated[str, AfterValidator(host_port)]
NodeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
TrackName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")]  # empty: the only one
Fraction = Annotated[float, Field(gt=0, le=1)]
