"""What a user types becomes what a factory takes, or an error that names the place and the choices."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.programs.arguments import (
    check_arguments,
    describe_arguments,
    parse_arguments,
    require_at_least,
    require_choice,
)


def factory(
    *, width: int = 8, rate: float = 0.5, tied: bool = True, data: str = "", shape: tuple[int, ...] = (1,)
) -> Any:
    return locals()


def unannotated(width=8, rate=0.5):
    return locals()


def demanding(*, path: str, **others: Any) -> Any:
    return locals()


def test_the_command_line_form_is_taken_apart():
    assert parse_arguments(" width=128, data=a=b ,,layers = 2") == {"width": "128", "data": "a=b", "layers": "2"}
    assert parse_arguments("") == {}


@pytest.mark.parametrize("text", ["width", "=3", "width=1,heads"])
def test_a_part_that_is_no_argument_is_refused(text):
    with pytest.raises(ConfigError, match="is no argument; write name=value"):
        parse_arguments(text)


def test_an_argument_given_twice_is_refused():
    with pytest.raises(ConfigError, match=r"program_arguments\.width is given twice, as '1' and as '2'"):
        parse_arguments("width=1,width=2")


def test_the_defaults_are_listed_in_the_order_of_the_signature():
    assert describe_arguments(signature(factory)) == {"width": 8, "rate": 0.5, "tied": True, "data": "", "shape": (1,)}
    assert describe_arguments(signature(demanding)) == {"path": ...}


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("width", 3, 3), ("width", "3", 3), ("rate", 1, 1.0), ("rate", "1e-3", 1e-3), ("tied", False, False),
        ("tied", "False", False), ("tied", "true", True), ("data", "3", "3"), ("shape", (2, 3), (2, 3)),
    ],
)  # fmt: skip
def test_a_value_is_read_as_the_type_that_is_wanted(name, value, wanted):
    found = check_arguments("p", signature(factory), {name: value})[name]
    assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("width", "3.5", "a whole number"), ("width", 3.0, "a whole number"), ("width", True, "a whole number"),
        ("rate", "fast", "a finite number"), ("rate", float("nan"), "a finite number"),
        ("rate", "inf", "a finite number"),
        ("rate", False, "a finite number"), ("tied", 1, "true or false"), ("tied", "yes", "true or false"),
        ("data", 3, "a text"), ("data", True, "a text"), ("width", None, "a whole number"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_with_its_place(name, value, words):
    with pytest.raises(ConfigError, match=rf"program_arguments\.{name} must be {words}, got "):
        check_arguments("p", signature(factory), {name: value})


def test_an_unknown_argument_is_refused_with_the_choices_and_the_nearest():
    with pytest.raises(ConfigError) as caught:
        check_arguments("p", signature(factory), {"widht": 3})
    assert str(caught.value) == (
        "program_arguments.widht: the program 'p' has no such argument (did you mean width?); "
        "it takes width=8, rate=0.5, tied=True, data=, shape=(1,)"
    )


def test_a_default_says_the_type_where_no_annotation_does():
    assert check_arguments("p", signature(unannotated), {"width": "3", "rate": "1"}) == {"width": 3, "rate": 1.0}
    with pytest.raises(ConfigError, match="a whole number"):
        check_arguments("p", signature(unannotated), {"width": "x"})


def test_an_argument_without_default_must_be_given():
    with pytest.raises(ConfigError, match=r"program_arguments\.path: the program 'p' needs this argument"):
        check_arguments("p", signature(demanding), {})
    assert check_arguments("p", signature(demanding), {"path": "x", "more": 1}) == {"path": "x", "more": 1}


def test_bounds_and_choices_name_the_place():
    require_at_least("width", 1, 1)
    require_choice("kind", "a", ("a", "b"))
    with pytest.raises(ConfigError, match=r"program_arguments\.width must be at least 1, got 0"):
        require_at_least("width", 0, 1)
    with pytest.raises(ConfigError, match=r"program_arguments\.kind must be one of a, b, got 'c'"):
        require_choice("kind", "c", ("a", "b"))
