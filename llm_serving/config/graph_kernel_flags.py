"""Reads ``context.graph_kernel_flags``, the flags of MindSpore's graph-kernel fusion, and refuses unknown ones.

MindSpore only warns about an unknown flag in its log. So a spelling mistake would be noticed only by a lower speed.
"""

from __future__ import annotations

from llm_serving.formats.typed_fields import TypedFields

KNOWN_FLAGS = frozenset(
    {
        "opt_level", "dump_as_text", "enable_stitch_fusion", "enable_recompute_fusion", "enable_parallel_fusion",
        "enable_horizontal_fusion", "enable_auto_tensor_inplace", "enable_dynamic_batch", "enable_csr_fusion",
        "enable_debug_mode", "enable_lite_conv_tuning", "enable_vectorization", "enable_dynamic_shape_fusion",
        "disable_matmul_post_fusion", "enable_allreduce_prologue_fusion", "enable_allreduce_epilogue_fusion",
        "exact_precision_mode", "reduce_fuse_depth", "online_tuning", "cpu_refer_thread_num", "fusion_ops_level",
        "parallel_ops_level", "recompute_increment_threshold", "recompute_peak_threshold", "composite_op_limit_size",
        "repository_path", "target_os", "cpu_arch", "cpu_feature", "cpu_type", "kernel_generator", "enable_expand_ops",
        "enable_expand_ops_only", "disable_expand_ops", "enable_cluster_ops", "enable_cluster_ops_only",
        "disable_cluster_ops", "enable_simplify_exprs_only", "disable_simplify_exprs", "enable_pass", "disable_pass",
        "enable_cce_lib", "enable_cce_lib_ops", "enable_cce_lib_ops_only", "disable_cce_lib_ops",
        "enable_packet_ops_only", "disable_packet_ops", "enable_fusion_pattern_only", "disable_fusion_pattern", "path",
    }
)  # fmt: skip
"""The flags that MindSpore 2.9.0 reads. Source: ``GraphKernelFlags::RegisterFlags`` and ``Refresh`` in
libmindspore_hardware_abstract.so of the aarch64 wheel."""


def parse_flags(text: str) -> dict[str, str]:
    """Parses a text such as ``--name=value --name``. Returns the values by name; a flag without a value has ``true``.
    """
    names = (token.removeprefix("--").partition("=") for token in text.split())
    return {name: value if separator else "true" for name, separator, value in names}


def read_flags(fields: TypedFields, key: str) -> str:
    """Returns the text of ``key``. Raises the error class of ``fields`` if a word is not a flag of MindSpore."""
    text = fields.text(key, "")
    for word in text.split():
        name = word.removeprefix("--").partition("=")[0]
        if not word.startswith("--"):
            raise fields.fail(key, f"the word {word!r} does not begin with --; flags have the form --name=value")
        if name not in KNOWN_FLAGS:
            known = ", ".join(f"--{each}" for each in sorted(KNOWN_FLAGS))
            raise fields.fail(key, f"MindSpore 2.9.0 has no flag --{name}; it has {known}")
    return text
