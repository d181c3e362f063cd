"""Reads the weights of a Hugging Face folder from safetensors files, as floats or in a quantised format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agent.weights.awq import AWQDecoder
from agent.weights.compressed_tensors import IntQuantizedDecoder, PackQuantizedDecoder
from agent.weights.cuts import TensorCut, copy_cut
from agent.weights.decoder import CutTensors, Decoder, StoredTensor, StoredTensors, check_stored, stem_of
from agent.weights.float8 import Float8Reader, weight_of
from agent.weights.gptq import GPTQDecoder
from agent.weights.layout import WeightPart
from agent.weights.model_slim import ModelSlimDecoder
from agent.weights.mxfp4 import SCHEME, Mxfp4Reader
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.storage import Array, convert_into
from agent.weights.tensor_files import TensorFiles, listed
from llm_serving.errors import CheckpointError
from llm_serving.model.float8 import Float8Blocks
from llm_serving.model.quantization import Quantization

_DECODERS: dict[str, type[Decoder]] = {
    "gptq": GPTQDecoder,
    "awq": AWQDecoder,
    "int-quantized": IntQuantizedDecoder,
    "pack-quantized": PackQuantizedDecoder,
    "model-slim": ModelSlimDecoder,
}


class Checkpoint:
    """A ``WeightSource`` that reads weights from a model folder. Owns the memory-mapped files."""

    def __init__(
        self, folder: Path, quantization: Quantization | None = None, float8: Float8Blocks | None = None
    ) -> None:
        """``quantization`` describes how integers are stored, and ``float8`` describes how 8-bit floats are stored.

        At most one of the two is not None.
        """
        self.folder = folder
        self._decoder = None if quantization is None else _DECODERS[quantization.layout](quantization)
        self._files = TensorFiles(folder)
        self._float8 = None if float8 is None else Float8Reader(self._files, float8)
        self._mxfp4 = Mxfp4Reader(self._files)
        self._parts: dict[str, WeightPart] = {}

    def check(self, expected: Sequence[WeightPart], ignorable: Iterable[str] = ()) -> None:
        """Raises CheckpointError unless the folder has exactly the ``expected`` tensors with their shapes.

        ``ignorable`` lists parts of names of tensors that may exist and are not read. A part that ends with "." is the
        beginning of these names. Any other part is their end.
        """
        self._parts = {part.name: part for part in expected}
        with self._with_folder_in_errors():
            stored = {each.name: each for part in expected for each in self._stored(part)}
        missing = [name for name, each in stored.items() if name not in self._files and not each.optional]
        if missing:
            raise CheckpointError(f"{self.folder}: {listed(missing)} missing from the weights{self._hint()}")
        ignored = tuple(ignorable)
        suffixes = tuple(each for each in ignored if not each.endswith("."))
        prefixes = tuple(each for each in ignored if each.endswith("."))
        unexpected = [
            name
            for name in self._files.names()
            if name not in stored and not weight_of(name).endswith(suffixes) and not name.startswith(prefixes)
        ]
        if self._decoder is not None:
            with self._with_folder_in_errors():
                extra = self._decoder.other_tensors(unexpected, self._parts, self._files.read_optional)
            unexpected = [name for name in unexpected if name not in extra]
        if unexpected:
            raise CheckpointError(
                f"{self.folder}: {listed(unexpected)} in the weights but not in a model of this config.json: "
                "weights and config.json do not belong together"
            )
        for name, each in stored.items():
            if name in self._files:
                self._check_stored(each)

    @property
    def bytes_read(self) -> int:
        """Number of bytes that were read from the files. If a tensor could only be read whole, its unused parts also
        count.
        """
        return self._files.bytes_read

    def names(self) -> tuple[str, ...]:
        """Returns the names of all tensors of the folder."""
        return self._files.names()

    def scheme(self, part: WeightPart) -> Scheme | None:
        """Returns the integer format and the groups of a quantised tensor, or None for a tensor of floats.

        Experts that are stored as 4-bit floats (MXFP4) count as quantised, because they are read as integers.
        """
        if self._mxfp4.holds(part.name):
            return SCHEME
        quantised = self._decoder is not None and self._is_quantised(part.name)
        return self._decoder.scheme_of(part.name) if self._decoder is not None and quantised else None

    def float_dtype(self, name: str) -> str | None:
        """Returns the element type of a tensor of floats, or None for a quantised tensor.

        Weights of 8-bit floats with scales are converted to float32, so the result is ``float32`` for them.
        """
        if self._is_float8(name):
            return "float32"
        is_quantised = self._is_quantised(name) or self._mxfp4.holds(name)
        return None if is_quantised else self._files.float_dtype(name)

    def read_quantised(self, part: WeightPart, cut: TensorCut | None = None) -> QuantizedTensor:
        """Reads a tensor that has a ``scheme``, or one part of the tensor, into new memory.

        Raises CheckpointError if a value is not valid or the part cannot be read separately.
        """
        if self._mxfp4.holds(part.name):
            with self._with_folder_in_errors():
                tensor = self._mxfp4.read(part, cut)
            self._mxfp4.release(part.name)
            return tensor
        assert self._decoder is not None, "the tensor must be quantised"
        stem = stem_of(part.name)
        with self._with_folder_in_errors():
            tensors = StoredTensors(stem, self._read_unless_bias)
            if cut is not None:
                tensors = CutTensors(tensors, cut, self._decoder, self._files.count)
                tensor = self._decoder.decode(WeightPart(part.name, cut.shape), tensors)
            else:
                tensor = self._decoder.decode(part, tensors)
        for stored in self._decoder.stored(part):
            if stored.name in self._files:
                self._files.release(stored.name)
        return tensor

    def read_into(self, name: str, out: Array, dtype: str, cut: TensorCut | None = None) -> None:
        """Copies a tensor, or one part of the tensor, to ``out`` as elements of ``dtype``.

        Raises CheckpointError if a value does not fit ``dtype``.
        """
        try:
            if self._is_quantised(name) or self._mxfp4.holds(name):
                part = WeightPart(name, out.shape if cut is None else cut.whole)
                tensor = self.read_quantised(part, cut)
                tensor.check_describes_layer(name)
                tensor.dequantise_into(out, dtype)
            elif self._float8 is not None and self._is_float8(name):
                self._float8.read_into(name, out, dtype, cut)
            else:
                source, source_dtype = self._files.read(name)
                if cut is None:
                    convert_into(source, source_dtype, out, dtype)
                else:
                    copy_cut(source, source_dtype, cut, out, dtype)
                self._files.count(out.size * source.itemsize)
                del source
                self._files.release(name)
        except OverflowError as reason:
            raise CheckpointError(
                f"{self._files.where(name)}: tensor {name}: {reason}; use model_config.model_dtype bfloat16 or float32"
            ) from reason
        except FloatingPointError as reason:
            raise CheckpointError(
                f"{self.folder}: tensor {name}: a stored number times its scale exceeds float32; the file is damaged"
            ) from reason

    def close(self) -> None:
        """Unmaps the files."""
        self._files.close()

    def _read_unless_bias(self, name: str) -> tuple[Array, str] | None:
        """Returns a stored tensor and its type, or None if the folder does not have the tensor.

        Also returns None for a bias that the model loads as a separate tensor.
        """
        return None if name in self._parts and name.endswith(".bias") else self._files.read_optional(name)

    def _is_quantised(self, name: str) -> bool:
        return self._decoder is not None and self._decoder.is_quantised(name, self._files.__contains__)

    def _is_float8(self, name: str) -> bool:
        return self._float8 is not None and self._float8.holds(name)

    def _stored(self, part: WeightPart) -> tuple[StoredTensor, ...]:
        if self._decoder is not None and self._is_quantised(part.name) and len(part.shape) == 2:
            return self._decoder.stored(part)
        if self._float8 is not None and self._is_float8(part.name) and len(part.shape) == 2:
            return self._float8.stored(part)
        if self._mxfp4.holds(part.name) and len(part.shape) == 3:
            return self._mxfp4.stored(part)
        return (StoredTensor(part.name, (), (part.shape,)),)

    def _hint(self) -> str:
        """Returns a hint for an error message if tensors are quantised but config.json has no ``quantization_config``.

        Otherwise returns an empty text.
        """
        quantised = any(name.endswith((".qweight", ".weight_packed")) for name in self._files.names())
        return (
            "; the tensors are quantised, but config.json has no quantization_config"
            if (quantised and self._decoder is None)
            else ""
        )

    def _check_stored(self, stored: StoredTensor) -> None:
        info = self._files.info(stored.name)
        if stored.types:
            try:
                check_stored(stored, info.dtype, info.shape)
            except CheckpointError as reason:
                raise CheckpointError(f"{self._files.where(stored.name)}: {reason}") from reason
            return
        if info.shape != stored.shapes[0]:
            raise CheckpointError(
                f"{self._files.where(stored.name)}: tensor {stored.name} has shape {list(info.shape)}; "
                f"config.json requires {list(stored.shapes[0])}"
            )
        self._files.read(stored.name)

    @contextmanager
    def _with_folder_in_errors(self) -> Iterator[None]:
        """Adds the path of the model folder to a CheckpointError that names only a tensor."""
        try:
            yield
        except CheckpointError as reason:
            raise CheckpointError(f"{self.folder}: {reason}") from reason
