"""Every field of every family's config.json: it changes the model, changes nothing, or is refused by name."""

import json
from pathlib import Path

import pytest

from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.families.fields import CHANGE_NOTHING
from jaxctx.model.registry import FAMILIES, NOT_COMPUTED, from_hf

GOLDENS = json.loads((Path(__file__).parents[2] / "goldens" / "classes.json").read_text())
COMPLETE = {
    each["config"]["architectures"][0]: each["config"] for each in GOLDENS if each["name"].endswith(": complete")
}
OTHER = (True, False, None, 0, 1, 2, 3, 0.5, 10**6, "", "x", [], {}, ["full_attention"], {"rope_type": "default"})
"""Values of every type. Of those that a field may have, at least one is not what a complete configuration says."""

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

by_family = pytest.mark.parametrize("architecture", FAMILIES)


def outcome(raw):
    """The model, or the field that is refused."""
    try:
        return from_hf(raw)
    except CheckpointError as error:
        return error.message.split(": ")[1].split(".")[0]


def test_no_family_is_here_and_not_computed():
    assert not FAMILIES.keys() & NOT_COMPUTED.keys()


@by_family
def test_there_is_a_complete_configuration(architecture):
    assert architecture in COMPLETE


@by_family
def test_each_understood_field_can_change_the_model_or_be_refused(architecture):
    family, complete = FAMILIES[architecture], COMPLETE[architecture]
    for field in family.fields | family.defaults.keys():
        outcomes = [
            outcome(each | {field: value}) != outcome(each)
            for each in (complete, complete | {"rope_scaling": LLAMA3})  # some fields mean something there alone
            for value in OTHER
        ]
        assert any(outcomes), f"{field} is said to be understood"


@by_family
def test_ignored_fields_change_nothing(architecture):
    family, complete = FAMILIES[architecture], COMPLETE[architecture]
    for field in (family.ignored | CHANGE_NOTHING | {"_anything"}) - family.fields - family.defaults.keys():
        assert {outcome(complete | {field: value}) == from_hf(complete) for value in OTHER} == {True}, field


@by_family
def test_an_unknown_field_that_says_something_is_refused_by_name(architecture):
    complete = COMPLETE[architecture]
    for value in OTHER:
        assert outcome(complete | {"attn_logit_bias": value}) == ("attn_logit_bias" if value else from_hf(complete))


@by_family
def test_a_changed_field_is_never_silently_another_field(architecture):
    """A refusal names the field that was changed, or one that it contradicts."""
    complete = COMPLETE[architecture]
    for field in complete:
        for value in OTHER:
            found = outcome(complete | {field: value})
            assert (
                not isinstance(found, str)
                or found in FAMILIES[architecture].fields | FAMILIES[architecture].defaults.keys()
            )
