"""The codecs by name, and the grammar of their specs.

    model    = chain *( ";" override )               what a run takes: `coding_from_spec`
    override = ( path-pattern / "<" values ) "=" chain
    chain    = *( wrapper "+" ) *( transform "+" ) codec  what one array takes: `codec_from_spec`
    member   = name [ ":" argument "=" number *( "," argument "=" number ) ]
    `fragments=n` is an argument of every codec: one n-th of the array is sent each time, in turn.

Rule: a codec's `name` is its spec in canonical form; codecs of one name are equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from zmqtrain.codecs.codec import Codec, Transform, chain
from zmqtrain.codecs.dct import dct
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.levels import int2, sign, ternary
from zmqtrain.codecs.lowrank import lowrank
from zmqtrain.codecs.plain import bf16, float32
from zmqtrain.codecs.quantize import int4, int4_stochastic, int8, int8_stochastic
from zmqtrain.codecs.sparsify import blocktopk, randomk, topk
from zmqtrain.codecs.wrappers import error_feedback, fragment, momentum_correction
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.specs import Made, Number, defaults_of, did_you_mean, parse_spec
from zmqtrain.core.types import LeafSpec

__all__ = [
    "CODECS",
    "TRANSFORMS",
    "WRAPPERS",
    "Codec",
    "Coding",
    "by_size",
    "codec_from_spec",
    "coding_from_spec",
    "per_leaf",
]

CODECS: dict[str, Callable[..., Codec]] = {
    "float32": float32,
    "bf16": bf16,
    "int8": int8,
    "int8s": int8_stochastic,
    "int4": int4,
    "int4s": int4_stochastic,
    "int2": int2,
    "ternary": ternary,
    "sign": sign,
    "lowrank": lowrank,
}
"""What turns values into bytes."""

TRANSFORMS: dict[str, Callable[..., Transform]] = {"topk": topk, "blocktopk": blocktopk, "randomk": randomk, "dct": dct}
"""What picks or turns values before a codec takes them."""

WRAPPERS: dict[str, Callable[..., Codec]] = {"feedback": error_feedback, "momentum": momentum_correction}
"""What keeps a residual around a codec: for gradients. In a run the residual lives in the model, and needs none."""

_MOST_MEMBERS = 8
_MOST_OVERRIDES = 64
_LONGEST_SPEC = 4096
_LONGEST_OVERRIDE = 512
"""A spec may come from another machine: reading it, and matching its patterns, must cost next to nothing."""

_BEFORE = {name: defaults_of(factory) for name, factory in (TRANSFORMS | WRAPPERS).items()}
_LAST = {name: {**defaults_of(factory), "fragments": 1} for name, factory in CODECS.items()}
"""The arguments of each member and their defaults: of what stands before the codec, and of the codec."""


@lru_cache(maxsize=1024)
def codec_from_spec(text: str) -> Codec:
    """Return the codec of a spec such as "ternary:block=128" or "topk:density=0.01+int4"; what is left out takes its
    default.

    Raises ConfigError: an unknown name or argument, an argument out of range, members in an order that makes no codec;
    the message quotes the place and lists the choices.
    """
    codec = _chain_from_spec(text)
    return codec if codec.name == text else codec_from_spec(codec.name)


def _chain_from_spec(text: str) -> Codec:
    members = re.split(r"\+(?=[a-z])", text)
    if len(members) > _MOST_MEMBERS:
        raise ConfigError(f"{text!r}: a chain of {len(members)} members; at most {_MOST_MEMBERS} make sense")
    *first, last = members
    for member in members:
        _check_name(text, member, member is last)
    wrappers: list[tuple[Callable[..., Codec], dict[str, Number]]] = []
    transforms: list[Transform] = []
    for member in first:
        name, arguments = _parse(text, member, _BEFORE)
        if name in TRANSFORMS:
            transforms.append(_make(text, TRANSFORMS[name], arguments))
        elif transforms:
            raise ConfigError(
                f"{text!r}: {member!r} keeps a residual around all of the chain: it stands before transforms"
            )
        else:
            wrappers.append((WRAPPERS[name], arguments))
    name, arguments = _parse(text, last, _LAST)
    fragments = int(arguments.pop("fragments"))
    codec = chain(*transforms, _make(text, CODECS[name], arguments))
    if fragments != 1:
        codec = _make(text, fragment, {"codec": codec, "fragments": fragments})
    for wrapper, arguments in reversed(wrappers):
        codec = _make(text, wrapper, {"codec": codec, **arguments})
    return codec


def _check_name(text: str, member: str, last: bool) -> None:
    name = member.partition(":")[0]
    if last and name in _BEFORE:
        raise ConfigError(f"{text!r}: {member!r} stands before a codec: say for instance {member + '+int8'!r}")
    if not last and name in CODECS:
        raise ConfigError(f"{text!r}: {member!r} is a codec, and stands last; before it: {', '.join(_BEFORE)}")
    if name not in (CODECS if last else _BEFORE):
        choices = f"a codec is one of {', '.join(CODECS)}; before it may stand {', '.join(_BEFORE)}"
        wrong = f"there is no {name!r}{did_you_mean(name, [*CODECS, *_BEFORE])}" if name else "no codec stands there"
        raise ConfigError(f"{text!r}: {wrong}; {choices}")


def _parse(text: str, member: str, families: Mapping[str, Mapping[str, Number]]) -> tuple[str, dict[str, Number]]:
    try:
        return parse_spec(member, families)
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}" if member != text else str(error)) from None


def _make(text: str, factory: Callable[..., Made], arguments: Mapping[str, object]) -> Made:
    try:
        return factory(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class Coding:
    """Which codec each leaf of a model has: the first override that fits it, or else the default.

    name: the canonical spec.  overrides: (what it fits, its codec): a pattern of the leaf's path as fnmatch reads it
    ("*bias", "layer0?/*"), or "<1024": leaves of fewer values.
    """

    default: Codec
    overrides: tuple[tuple[str, Codec], ...] = ()

    @property
    def name(self) -> str:
        """The canonical spec: `coding_from_spec(name)` gives an equal coding."""
        return ";".join([self.default.name, *(f"{fits}={codec.name}" for fits, codec in self.overrides)])

    def of(self, leaf: LeafSpec) -> Codec:
        """Return the codec of one leaf."""
        for fits, codec in self.overrides:
            if leaf.values < int(fits[1:]) if fits.startswith("<") else fnmatchcase(leaf.path, fits):
                return codec
        return self.default

    def of_fragment(self, layout: Layout, fragment: int) -> tuple[Codec, ...]:
        """Return the codec of each segment of a fragment, in order."""
        return _of_fragment(self, layout, fragment)


@lru_cache(maxsize=2048)
def _of_fragment(coding: Coding, layout: Layout, fragment: int) -> tuple[Codec, ...]:
    return tuple(coding.of(layout.spec[leaf]) for leaf in layout.leaves(fragment))


def per_leaf(default: Codec, overrides: Mapping[str, Codec]) -> Coding:
    """Return the coding of a model by the paths of its leaves: the first pattern that fits counts.

    Raises ConfigError for a pattern that cannot be written in a spec (one with ";", "=" or "+": "?" fits those), and
    for a codec that keeps a residual or takes turns with fragments: in a run the residual lives in the model, and
    `fragments` is a setting of the run.
    """
    if len(overrides) > _MOST_OVERRIDES:
        raise ConfigError(f"{len(overrides)} overrides; at most {_MOST_OVERRIDES} make sense")
    for fits in overrides:
        _check_override(fits)
    for codec in (default, *overrides.values()):
        _check_of_a_run(codec)
    return Coding(default, tuple(overrides.items()))


def by_size(codec: Codec, small: Codec, values: int = 1024) -> Coding:
    """Return the coding of a model whose leaves of fewer than `values` values have the codec `small`."""
    return per_leaf(codec, {f"<{values}": small})


def _check_override(fits: str) -> None:
    if not 0 < len(fits) <= _LONGEST_OVERRIDE or any(mark in fits for mark in ";=+"):
        raise ConfigError(f"{fits!r} is no pattern of a leaf's path, such as '*bias', nor a size, such as '<1024'")
    if fits.startswith("<") and not re.fullmatch("<[1-9][0-9]{0,14}", fits):
        raise ConfigError(f"{fits!r} is no size: say for instance '<1024' for leaves of fewer than 1024 values")


@lru_cache(maxsize=256)
def coding_from_spec(text: str) -> Coding:
    """Return the coding of a model from a spec such as "ternary;<1024=bf16;*embedding=int8:block=64".

    Raises ConfigError as `codec_from_spec` and `per_leaf` do, and for a text of more than 4,096 characters.
    """
    if len(text) > _LONGEST_SPEC or not text.isprintable():
        raise ConfigError(f"{text[:40]!r}... is {len(text)} characters long, or not all of them can be printed")
    first, *rest = text.split(";")
    overrides: dict[str, Codec] = {}
    for override in rest:
        fits, equals, spec = override.partition("=")
        if not equals:
            raise ConfigError(f"{text!r}: cannot read {override!r}: say for instance '*bias=float32' or '<1024=bf16'")
        if fits in overrides:
            raise ConfigError(f"{text!r}: {fits!r} is given twice")
        overrides[fits] = codec_from_spec(spec)
    return per_leaf(codec_from_spec(first), overrides)


def _check_of_a_run(codec: Codec) -> None:
    for wrapper in WRAPPERS:
        if f"{wrapper}:" in codec.name:
            raise ConfigError(f"{codec.name!r}: {wrapper} is for gradients; in a run what is unsent stays in the model")
    if ",fragments=" in codec.name or ":fragments=" in codec.name:
        raise ConfigError(f"{codec.name!r}: fragments cannot be a leaf's own; say fragments once, for the whole model")
