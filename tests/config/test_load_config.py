"""Tests loading a config: the search by name, overrides, values from the model folder, and the JSON for agents."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from llm_serving.config import Config, load_config
from llm_serving.config.hardware import has_ascend, multiplies_bfloat16
from llm_serving.config.lookup import DATA_ROOTS, find_config_file
from llm_serving.errors import ConfigError
from llm_serving.ipc.shm import SlotLimits
from support.model_folders import write_model_folder

TINY = "llama_tiny_cpu.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model")


def write_config(path: Path, **sections: object) -> str:
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return str(path)


def test_the_default_serves_any_folder_with_one_override(tmp_path: Path) -> None:
    folder = write_model_folder(
        tmp_path / "other-llama",
        vocab_size=128256,
        max_position_embeddings=512,
        eos_token_id=128001,
        bos_token_id=128000,
        generation={"eos_token_id": [128001, 128008, 128009]},
    )
    config = load_config(TINY, [f"model_config.model_path={folder}"])
    assert config.shape.vocab_size == config.model_config.vocab_size == 128256
    assert config.end_token_ids == (128001, 128008, 128009)
    assert (config.max_model_len, config.max_prompt_len) == (512, 512)
    assert config.model_config.model_path == str(folder)
    assert config.tokenizer_file == str(folder / "tokenizer.json")
    assert config.tokenizer.type == "LlamaTokenizerFast"
    assert config.model_config.load_format == "safetensors"
    assert (config.device, config.op_table, config.model_config.model_dtype) == ("CPU", "fused", "float32")
    assert config.notes == ()


def test_derived_limits(folder: Path) -> None:
    config = load_config(TINY, [f"model_config.model_path={folder}"])
    assert config.max_model_len == 2048
    assert config.max_num_seqs == config.max_decode_seqs == 64
    assert config.max_prefill_seqs == 16
    assert config.max_num_batched_tokens == 2048
    assert config.max_blocks_per_seq == 128
    assert config.slot_limits() == SlotLimits(2048, 64, max_blocks_per_seq=128, max_context=2048, mask_words=10)
    without_masks = load_config(TINY, [f"model_config.model_path={folder}", "serving_config.structured_outputs=false"])
    assert without_masks.slot_limits().mask_words == 0


def test_a_step_is_never_larger_than_its_sequences_can_fill(folder: Path) -> None:
    overrides = [f"model_config.model_path={folder}", "model_config.prefill_batch_size=[1]"]
    config = load_config(TINY, [*overrides, "pa_config.decode_seq_length=100"])
    assert config.max_num_batched_tokens == 100
    config = load_config(TINY, [*overrides, "pa_config.decode_seq_length=33"])
    assert config.max_num_batched_tokens == 64, "a decode step has a token for each of 64 sequences"
    assert config.max_blocks_per_seq == 3
    config = load_config(TINY, [*overrides, "scheduler_config.max_num_batched_tokens=128"])
    assert config.max_num_batched_tokens == 128


def test_the_largest_batch_size_is_the_limit(folder: Path) -> None:
    overrides = [f"model_config.model_path={folder}", "model_config.decode_batch_size=[1, 4, 16]"]
    config = load_config(TINY, [*overrides, "model_config.seq_length=[64, 512, 256]"])
    assert (config.max_num_seqs, config.max_decode_seqs, config.max_prompt_len) == (16, 16, 512)
    config = load_config(TINY, [*overrides, "scheduler_config.max_num_seqs=8"])
    assert (config.max_num_seqs, config.max_decode_seqs, config.max_prefill_seqs) == (8, 8, 8)


@pytest.mark.parametrize("single", ["model_config.decode_batch_size=[1]", "scheduler_config.max_num_seqs=1"])
def test_a_decode_step_of_one_sequence_has_space_for_its_drafts(folder: Path, single: str) -> None:
    def sizes(*more: str) -> tuple[int, int, int, int]:
        config = load_config(TINY, [f"model_config.model_path={folder}", single, *more])
        assert config.max_decode_seqs == 1
        assert config.slot_limits().max_seqs == config.max_step_seqs
        return config.max_num_seqs, config.max_drafts, config.max_decode_entries, config.max_step_seqs

    assert sizes() == (1, 7, 8, 8)
    assert sizes("speculative_config.max_draft_tokens=40") == (1, 40, 41, 41)
    assert sizes("speculative_config.method=off") == (1, 0, 1, 1)
    assert sizes("scheduler_config.max_num_batched_tokens=5") == (1, 4, 5, 5)
    assert sizes("parallel_config.pipeline_parallel=2") == (1, 0, 1, 1)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["scheduler_config.max_num_batched_tokens=1"], "max_num_batched_tokens = 1: a step has space for none of"),
        (["scheduler_config.max_num_batched_tokens=7"], "max_num_batched_tokens = 7: a step has space for 6 of the"),
        (["model_config.seq_length=[2]"], "model_config.seq_length = 2: a step has space for 1 of the 7"),
    ],
)
def test_a_note_states_that_steps_are_too_small_for_drafts(folder: Path, settings: list[str], problem: str) -> None:
    config = load_config(TINY, [f"model_config.model_path={folder}", "model_config.decode_batch_size=[1]", *settings])
    [note] = config.notes
    assert problem in note
    assert note.endswith("(speculative_config.max_draft_tokens); all of them need a step of at least 8 tokens")


@pytest.mark.parametrize(
    "settings",
    [
        ["scheduler_config.max_num_batched_tokens=8"],
        ["scheduler_config.max_num_batched_tokens=4", "speculative_config.max_draft_tokens=3"],
        ["scheduler_config.max_num_batched_tokens=1", "speculative_config.method=off"],
        ["scheduler_config.max_num_batched_tokens=1", "parallel_config.pipeline_parallel=2"],
        ["scheduler_config.max_num_batched_tokens=8", "model_config.decode_batch_size=[8]"],
    ],
)
def test_no_note_is_made_if_all_wanted_drafts_have_space(folder: Path, settings: list[str]) -> None:
    single = "model_config.decode_batch_size=[1]"
    assert load_config(TINY, [f"model_config.model_path={folder}", single, *settings]).notes == ()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["model_config.seq_length=[4096]"], ["seq_length = [4096]: {} pa_config.decode_seq_length is 2048"]),
        (
            ["model_config.max_generate_length=100", "pa_config.decode_seq_length=200"],
            ["decode_seq_length = 200: a sequence has at most 100 tokens, because model_config.max_generate_length"],
        ),
        (
            ["model_config.max_generate_length=5000", "pa_config.decode_seq_length=5000"],
            [
                "model_config.max_generate_length = 5000: {} the model's number of positions is 2048",
                "pa_config.decode_seq_length = 5000: {} the model's number of positions is 2048",
            ],
        ),
        (["model_config.max_generate_length=100"], []),
        (["model_config.seq_length=[auto]", "pa_config.decode_seq_length=auto"], []),
    ],
)
def test_a_note_names_the_limit_of_a_length_on_the_command_line(settings: list[str], expected: list[str]) -> None:
    notes = load_config(TINY, settings).notes
    assert len(notes) == len(expected)
    for note, text in zip(notes, expected, strict=True):
        assert text.format("a sequence has at most 2048 tokens, because") in note


STEP = "scheduler_config.max_num_batched_tokens"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["model_config.prefill_batch_size=[4]"], "4 sequences (model_config.prefill_batch_size) of 2048 tokens"),
        (
            ["model_config.prefill_batch_size=[4]", "scheduler_config.max_num_seqs=3"],
            "3 sequences (scheduler_config.max_num_seqs) of 2048 tokens",
        ),
        (
            ["model_config.prefill_batch_size=[4]", "model_config.decode_batch_size=[2]"],
            "2 sequences (model_config.decode_batch_size) of 2048 tokens",
        ),
    ],
)
def test_a_note_says_that_a_step_has_fewer_tokens_than_the_command_line(settings: list[str], expected: str) -> None:
    full = int(expected[0]) * 2048
    config = load_config(TINY, [*settings, f"{STEP}=100000"])
    assert config.max_num_batched_tokens == full
    [note] = config.notes
    assert f"{STEP} = 100000: a step has at most {full} tokens, because a prefill step has at most {expected}" in note
    assert load_config(TINY, [*settings, f"{STEP}={full}"]).notes == ()


def test_the_note_names_the_decode_step_if_it_is_larger_than_a_prefill_step() -> None:
    sizes = ["model_config.prefill_batch_size=[1]", "model_config.decode_batch_size=[32]"]
    lengths = ["model_config.max_generate_length=16", "pa_config.decode_seq_length=auto"]
    [note] = load_config(TINY, [*sizes, *lengths, f"{STEP}=64"]).notes
    assert note.endswith(
        "a step has at most 32 tokens, because a prefill step has at most 1 sequence "
        "(model_config.prefill_batch_size) of 16 tokens, and a decode step has at most 32"
    )


def test_a_large_decode_step_gets_no_more_tokens_for_drafts(folder: Path) -> None:
    config = load_config(TINY, [f"model_config.model_path={folder}", "model_config.decode_batch_size=[4, 30]"])
    assert (config.max_decode_seqs, config.max_decode_entries, config.max_step_seqs) == (30, 30, 30)


def test_dummy_weights_need_no_weight_files(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "bare", files=("tokenizer.model",))
    config = load_config(TINY, [f"model_config.model_path={folder}", "model_config.load_format=dummy"])
    assert config.model_config.load_format == "dummy"
    assert config.tokenizer.type == "LlamaTokenizer"
    assert config.tokenizer_file == str(folder / "tokenizer.model")


def test_override_values_are_yaml_and_the_last_one_wins(folder: Path) -> None:
    config = load_config(
        TINY,
        [
            f"model_config.model_path={folder}",
            "serving_config.agent_ports=[0]",
            "serving_config.server_port=1",
            "serving_config.server_port=0",
            "pa_config.num_blocks = 4096",
            "model_config.end_token=7",
            "log_config.log_prompts=true",
            "log_config.state_interval_s=2",
            "log_config.path=a=b.log",
            "model_config.model_name=2024",
            'model_config.model_dtype="DataType.BFLOAT16"',
        ],
    )
    assert config.serving_config.agent_ports == (0,)
    assert config.serving_config.server_port == 0
    assert config.pa_config.num_blocks == 4096
    assert config.end_token_ids == (7,)
    assert config.log_config.log_prompts is True
    assert config.log_config.state_interval_s == 2.0
    assert isinstance(config.log_config.state_interval_s, float)
    assert config.log_config.path == "a=b.log"
    assert config.model_name == "2024"
    assert config.model_config.model_dtype == "bfloat16"


@pytest.mark.parametrize("text", ["null", "~", ""])
def test_override_with_null(folder: Path, text: str) -> None:
    config = load_config(TINY, [f"model_config.model_path={folder}", f"model_config.model_name={text}"])
    assert config.model_name == "model", "the name of the folder"


def test_a_folder_name_that_is_not_a_url_segment_becomes_a_valid_model_name(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "-my llama (v2)")
    config = load_config(TINY, [f"model_config.model_path={folder}", "model_config.model_name=null"])
    assert config.model_name == "my-llama--v2-"


def test_token_ids_in_the_file_apply_only_to_its_own_model(tmp_path: Path) -> None:
    own = write_model_folder(tmp_path / "own", pad_token_id=0)
    other = write_model_folder(tmp_path / "other", vocab_size=500, eos_token_id=[401, 402], pad_token_id=499)
    file = write_config(
        tmp_path / "c.yaml",
        model_config={"model_path": str(own), "vocab_size": 300, "end_token": 5, "pad_token_id": 6},
    )
    config = load_config(file)
    assert (config.shape.vocab_size, config.end_token_ids, config.model_config.pad_token_id) == (300, (5,), 6)

    config = load_config(file, [f"model_config.model_path={other}"])
    assert (config.shape.vocab_size, config.end_token_ids, config.model_config.pad_token_id) == (500, (401, 402), 499)
    assert config.notes == (
        f"{file}: model_config.vocab_size = 300: {other}/config.json has vocab_size 500; the model folder wins, "
        "as --set named it",
        f"{file}: model_config.end_token = 5: the model folder has end tokens [401, 402]; the model folder wins, "
        "as --set named it",
    )

    config = load_config(file, [f"model_config.model_path={other}", "model_config.end_token=9"])
    assert config.end_token_ids == (9,)


def test_the_end_token_of_the_file_is_used_if_the_folder_has_none(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", remove=("eos_token_id",))
    assert load_config(TINY, [f"model_config.model_path={folder}"]).end_token_ids == ()
    file = write_config(tmp_path / "c.yaml", model_config={"end_token": 5})
    assert load_config(file, [f"model_config.model_path={folder}"]).end_token_ids == (5,)


def test_paths_are_relative_to_the_config_and_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = write_model_folder(tmp_path / "deployment" / "model", vocab_size=301)
    file = write_config(tmp_path / "deployment" / "c.yaml", model_config={"model_path": "model"})
    assert load_config(file).model_config.model_path == str(beside)
    here = write_model_folder(tmp_path / "here" / "model", vocab_size=302)
    monkeypatch.chdir(tmp_path / "here")
    assert load_config(file).model_config.model_path == str(here)


def test_configs_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    in_repository = DATA_ROOTS[0] / "configs" / "llama" / TINY
    assert find_config_file(TINY) == in_repository
    assert find_config_file(f"llama/{TINY}") == in_repository
    (tmp_path / TINY).write_text("{}", encoding="utf-8")
    assert find_config_file(TINY) == tmp_path / TINY, "the working directory comes first"


@pytest.mark.parametrize("name", ["", ".", "../x.yaml", "/no/such.yaml", "x" * 5000 + ".yaml", "~nobody-here/x.yaml"])
def test_a_missing_config_file_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="no such config file"):
        find_config_file(name)


def test_configs_in_the_installed_package_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "configs" / "llama").mkdir(parents=True)
    file = tmp_path / "data" / "configs" / "llama" / "packaged.yaml"
    file.write_text("{}", encoding="utf-8")
    monkeypatch.setattr("llm_serving.config.lookup.DATA_ROOTS", (tmp_path / "none", tmp_path / "data"))
    assert find_config_file("packaged.yaml") == file
    (tmp_path / "data" / "configs" / "packaged.yaml").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="names more than one config file"):
        find_config_file("packaged.yaml")


def test_json_round_trip(folder: Path) -> None:
    config = load_config(TINY, [f"model_config.model_path={folder}", "model_config.end_token=3"])
    assert Config.from_json(config.to_json()) == config
    assert Config.from_json(config.to_json().encode()) == config


def test_json_round_trip_of_everything(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = write_model_folder(
        tmp_path / "m", rope_scaling=scaling | {"original_max_position_embeddings": 128}, files=("tokenizer.model",)
    )
    overrides = [f"model_config.model_path={folder}", "model_config.load_format=dummy"]
    config = load_config("llama_7b_kbk_pa_dyn.yaml", overrides)
    assert config.shape.rope_scaling is not None
    assert config.notes
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("[1]", "must be a mapping"),
        ("[" * 100_000, "not valid JSON"),
        ("{}", "missing"),
        ('{"fille": 1}', "did you mean 'file'"),
        ('{"model_config": {"seq_length": 5}}', "must be a list of an integer"),
    ],
)
def test_other_json_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.from_json(text)


def test_config_is_frozen(folder: Path) -> None:
    config = load_config(TINY, [f"model_config.model_path={folder}"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.pa_config.num_blocks = 1  # type: ignore[misc]


class TestDevice:
    """Tests the setting ``device_target`` on machines with and without an Ascend."""

    def load(self, folder: Path, ascend: bool, *overrides: str) -> Config:
        return load_config(TINY, [f"model_config.model_path={folder}", *overrides], ascend=ascend)

    def test_auto(self, folder: Path) -> None:
        assert self.load(folder, False).device == "CPU"
        config = self.load(folder, True, "model_config.model_dtype=float16")
        assert (config.device, config.op_table) == ("Ascend", "native")

    def test_named(self, folder: Path) -> None:
        assert self.load(folder, True, "model_config.device_target=CPU").device == "CPU"
        with pytest.raises(ConfigError, match=r"^command line: model_config.device_target = 'Ascend': there is no"):
            self.load(folder, False, "model_config.device_target=Ascend")

    def test_null_takes_the_mindformers_target(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "mf.yaml").write_text("context: {device_target: Ascend}\n", encoding="utf-8")
        named = (f"model_config.model_cfg_path={tmp_path / 'mf.yaml'}", "model_config.model_dtype=float16")
        assert self.load(folder, True, *named, "model_config.device_target=null").device == "Ascend"
        with pytest.raises(ConfigError, match="there is no Ascend"):
            self.load(folder, False, *named, "model_config.device_target=null")
        assert self.load(folder, False, *named, "model_config.device_target=auto").device == "CPU"

    def test_detection(self, tmp_path: Path) -> None:
        devices, cann = tmp_path / "dev", tmp_path / "cann"
        devices.mkdir()
        cann.mkdir()
        environment = {"ASCEND_HOME_PATH": str(cann)}
        (devices / "davinci_manager").touch()
        assert not has_ascend(environment, devices)
        (devices / "davinci0").touch()
        assert has_ascend(environment, devices)
        assert not has_ascend({}, devices)
        assert not has_ascend({"ASCEND_HOME_PATH": str(tmp_path / "gone")}, devices)


class TestModelDtype:
    """``model_dtype: auto`` depends on the processor and the operators."""

    X86 = "processor : 0\nflags : fpu avx512f avx512_bf16 amx_bf16\n\nprocessor : 1\nflags : fpu\n"
    ARM = "processor : 0\nFeatures : fp asimd i8mm bf16\n"

    @pytest.mark.parametrize(
        ("ascend", "bfloat16", "op_table", "dtype"),
        [
            (False, False, "auto", "float32"),
            (False, True, "auto", "bfloat16"),
            (True, False, "auto", "bfloat16"),
            (False, False, "native", "bfloat16"),
        ],
    )
    def test_auto(self, ascend: bool, bfloat16: bool, op_table: str, dtype: str) -> None:
        own = ("model_config.model_dtype=auto", f"model_config.op_table={op_table}", "model_config.device_target=auto")
        config = load_config("llama_tiny_cpu.yaml", own, ascend=ascend, bfloat16=bfloat16)
        assert (config.model_config.model_dtype, config.kv_format) == (dtype, dtype)

    @pytest.mark.parametrize(("stated", "dtype"), [("float32", "float32"), ("bf16", "bfloat16"), ("int8", "bfloat16")])
    def test_auto_is_the_type_of_float_weights(self, stated: str, dtype: str) -> None:
        own = ("model_config.model_dtype=auto", f"model_config.weight_format={stated}")
        config = load_config("llama_tiny_cpu.yaml", own, ascend=False, bfloat16=True)
        assert config.model_config.model_dtype == dtype

    def test_auto_with_native_operators_is_the_type_of_mindformers(self, tmp_path: Path) -> None:
        text = "model: {model_config: {compute_dtype: float16}}\n"
        (tmp_path / "mf.yaml").write_text(text, encoding="utf-8")
        own = ("model_config.model_dtype=auto", f"model_config.model_cfg_path={tmp_path / 'mf.yaml'}")
        config = load_config("llama_tiny_cpu.yaml", own, ascend=True)
        assert (config.model_config.model_dtype, config.notes) == ("float16", ())

    def test_a_stated_type_stays(self) -> None:
        config = load_config("llama_tiny_cpu.yaml", ("model_config.model_dtype=float16",), ascend=False, bfloat16=True)
        assert config.model_config.model_dtype == "float16"

    @pytest.mark.parametrize(
        ("text", "isa", "expected"),
        [
            (X86, "", True),
            (ARM, "", True),
            (X86.replace("avx512_bf16 ", ""), "", False),
            (ARM.replace(" bf16", ""), "", False),
            ("processor : 0\n", "", False),
            (X86, "avx512_vnni", False),
            (X86, "avx512_amx", True),
        ],
    )
    def test_detection(self, tmp_path: Path, text: str, isa: str, expected: bool) -> None:
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text(text, encoding="utf-8")
        assert multiplies_bfloat16({"LLM_KERNELS_ISA": isa}, cpuinfo) is expected
        assert not multiplies_bfloat16({}, tmp_path / "missing")
