"""Tests the table of sampling parameters.

HTTP, the step slot in shared memory, and the C++ sampler agree with the table.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from pydantic import ValidationError

from agent.kernels.sample_call import SAMPLE_INPUTS, _SampleArgs
from llm_serving.ipc.shm import SlotLayout, SlotLimits, StepSlot
from llm_serving.sampling_params import PARAMETERS, SAMPLER_PARAMETERS, SamplingParams
from llm_serving.server.fields.shared import SamplingFields
from llm_serving.server.generation.sampling import base_sampling
from support.small_configs import REPOSITORY

RANGED = [each for each in PARAMETERS.values() if each.low is not None or each.above is not None]
IN_BODY = [each for each in RANGED if each.name in SamplingFields.model_fields]
C_TYPES = {"float32": "float", "int32": "int32_t", "uint64": "uint64_t"}


def test_the_sampler_in_c_has_the_parameters_in_the_order_of_the_table():
    header = (REPOSITORY / "agent" / "kernels" / "ops" / "sampler.h").read_text()
    [body] = re.findall(r"struct SampleArgs {(.*?)\n};", header, re.DOTALL)
    lines = [re.findall(r"(?!const\b)\b\w+", line.split("//")[0]) for line in body.splitlines()]
    declared = [(name, words[0]) for words in lines for name in words[1:]]
    assert [name for name, _ in declared] == [name for name, _ in _SampleArgs._fields_]
    types = dict(declared)
    assert {each.name: types[each.name] for each in SAMPLER_PARAMETERS} == {
        each.name: C_TYPES[each.column] for each in SAMPLER_PARAMETERS
    }


def test_a_step_slot_has_a_column_for_each_parameter_of_the_sampler():
    layout = SlotLayout.of(SlotLimits(max_tokens=8, max_seqs=4, max_blocks_per_seq=2, max_context=16))
    arrays = StepSlot(layout, bytearray(layout.slot_bytes)).arrays
    for name, dtype in SAMPLE_INPUTS.items():
        assert (arrays[name].dtype, arrays[name].size) == (dtype, 4)
    assert [each.name for each in SAMPLER_PARAMETERS if each.name not in SAMPLE_INPUTS] == []


def test_every_parameter_of_the_sampler_is_a_field_of_the_openai_api():
    assert {each.name for each in SAMPLER_PARAMETERS} <= set(SamplingFields.model_fields)


@pytest.mark.parametrize("parameter", IN_BODY, ids=lambda each: each.name)
def test_the_api_takes_the_range_of_the_table_and_no_more(parameter):
    is_float = isinstance(parameter.default, float)
    step = 0.001 if is_float else 1
    lowest = parameter.low if parameter.low is not None else parameter.above + step
    for value in (lowest, parameter.high):
        fields = SamplingFields.model_validate({parameter.name: value})
        assert getattr(fields, parameter.name) == value
    below = parameter.low - step if parameter.low is not None else parameter.above
    for value in (below, parameter.high + step):
        with pytest.raises(ValidationError) as caught:
            SamplingFields.model_validate({parameter.name: value})
        assert caught.value.errors()[0]["loc"] == (parameter.name,)


def test_a_request_that_sets_nothing_has_the_defaults():
    assert base_sampling(SamplingFields.model_validate({}), {}) == SamplingParams()


@pytest.mark.parametrize(
    "parameter", [each for each in SAMPLER_PARAMETERS if each.name != "seed"], ids=lambda each: each.name
)
def test_the_value_of_a_request_reaches_the_sampling_params(parameter):
    value = type(parameter.default)(parameter.high)
    sampling = base_sampling(SamplingFields.model_validate({parameter.name: value}), {})
    assert getattr(sampling, parameter.name) == value
    assert np.array(value, parameter.column) == value
    assert sampling.has_penalties == parameter.needs_history
