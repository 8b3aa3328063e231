"""Folders whose experts are quantised as mxfp4, as OpenAI published gpt-oss (OCP Microscaling Formats, version 1.0).

A stacked matrix NAME [E, I, O] is stored by outputs: NAME_blocks, uint8 [E, O, I / 32, 16], has two numbers of 4 bits
in a byte, the first one in its low bits. NAME_scales, uint8 [E, O, I / 32], has the exponent of a power of 2 for each
32 numbers, plus 127. bfloat16 has all values of such a matrix exactly.
"""

import numpy as np

from jaxstack.config import ConfigError
from jaxstack.config.scheme import Scheme
from jaxstack.hf.json_keys import Keys
from jaxstack.hf.safetensors import TensorFiles, TensorInfo

METHOD = "mxfp4"
BLOCK = 32
"""Numbers with one scale."""

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = np.array([*_SIZES, *(-size for size in _SIZES)], np.float32)
"""The number of each code of 4 bits: a sign, two bits of exponent and one of mantissa."""

_BLOCKS = "_blocks"
_SCALES = "_scales"


def check(where: str, values: object) -> None:
    """Checks a `quantization_config` of this method.

    Raises:
      ConfigError: a key or value that would change the result and is not supported.
    """
    keys = Keys(f"{where}: quantization_config", values)
    keys.expect("quant_method", METHOD)
    keys.drop({"modules_to_not_convert", "dequantize"})  # the tensors show which matrices are quantised
    keys.require_empty()


class Mxfp4Files:
    """The tensors of a folder as if they were not quantised: a part that is read is dequantised.

    Attributes:
      infos: the tensors by name, as in `TensorFiles`; a quantised matrix is NAME [E, I, O] in bfloat16.
      schemes: formats that `compress quantize` can write, of which this is none.

    Raises:
      ConfigError: parts of a quantised matrix that are missing or do not fit together.
    """

    def __init__(self, files: TensorFiles) -> None:
        self._files = files
        self.schemes: dict[Scheme, bool] = {}
        self._quantized: set[str] = set()
        self.infos = {name: info for name, info in files.infos.items() if not name.endswith((_BLOCKS, _SCALES))}
        for part in files.infos:
            if part.endswith((_BLOCKS, _SCALES)):
                name = part.removesuffix(_BLOCKS).removesuffix(_SCALES)
                self.infos[name] = self._info(name)

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def scheme_of(self, name: str) -> None:
        """Returns `None`: no matrix has a format that `compress quantize` can write."""
        return

    def _info(self, name: str) -> TensorInfo:
        """Returns shape and dtype of a quantised matrix, and keeps its name."""
        held = self._files.infos
        for part in (name + _BLOCKS, name + _SCALES):
            if part not in held:
                raise ConfigError(
                    f"{self._files.folder} has parts of the quantised matrix {name}, but not {part}. Fetch or save it "
                    f"again."
                )
        blocks = held[name + _BLOCKS]
        scales = held[name + _SCALES]
        if blocks.dtype != "U8" or scales.dtype != "U8" or blocks.shape != (*scales.shape[:3], BLOCK // 2):
            raise ConfigError(
                f"{blocks.file}: {name} has {blocks.dtype} blocks {list(blocks.shape)} and {scales.dtype} scales "
                f"{list(scales.shape)}, which is not mxfp4 with a scale for {BLOCK} numbers. Fetch or save it again."
            )
        self._quantized.add(name)
        experts, outputs, groups, _ = blocks.shape
        return TensorInfo(blocks.file, (experts, groups * BLOCK, outputs), "BF16")

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of a tensor; of a quantised matrix its values, float32."""
        if name not in self._quantized:
            return self._files.read(name, index)
        shape = self.infos[name].shape
        index += (slice(None),) * (3 - len(index))
        experts, inputs, outputs = (slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))
        groups = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
        held = self._files.read(name + _BLOCKS, (experts, outputs, groups, slice(None)))
        exponents = self._files.read(name + _SCALES, (experts, outputs, groups)).astype(np.int32) - 127
        codes = np.stack([held & 15, held >> 4], axis=-1).reshape(*held.shape[:3], BLOCK)
        values = np.ldexp(NUMBERS[codes], exponents[..., None])  # [E, O, groups, 32]
        start = groups.start * BLOCK
        rows = values.reshape(*held.shape[:2], -1)[..., inputs.start - start : inputs.stop - start]
        return rows.swapaxes(1, 2)
