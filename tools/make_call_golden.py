"""Writes tests/golden/calls.json: texts of tool calls, rendered by other programs. The tests of the parser read them.

Our own descriptions of the formats play no part in these texts. Three sources render the same cases:

- ``openai-harmony``, OpenAI's library for gpt-oss. It needs the vocabulary ``o200k_base``, which ``litellm`` contains.
- ``mistral-common``, Mistral's library, for several versions of its tokenizers.
- Chat templates: those in the package ``trl``, which come from the published models, and files on the command line.

The program needs an environment of its own:

    python3.11 -m venv /tmp/calls
    /tmp/calls/bin/pip install openai-harmony==0.0.8 mistral-common==1.12.0 sentencepiece jinja2
    /tmp/calls/bin/pip download --no-deps --dest /tmp/calls/wheels litellm==1.110.2 trl==1.16.0
    /tmp/calls/bin/python tools/make_call_golden.py --wheels /tmp/calls/wheels \\
        --template deepseek_v31 V3.1.jinja "llama.cpp, models/templates/deepseek-ai-DeepSeek-V3.1.jinja" \\
        --template pythonic 3.2.jinja "vLLM, examples/tool_chat_template_llama3.2_pythonic.jinja"

Each ``--template`` names a format, a file and its source. Only the rendered calls are stored, no template. The cases
are in ``tools/call_golden/cases.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llm_serving.parsing.formats import OutputFormat  # noqa: E402
from tools.call_golden.cases import CASES, TOOLS, Case  # noqa: E402
from tools.call_golden.libraries import O200K, harmony_text, mistral_text  # noqa: E402

OUTPUT = ROOT / "tests" / "golden" / "calls.json"
TRL = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_5_nothink": "qwen3_coder",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "deepseekv3": "deepseek_v3",
    "gptoss": "gpt_oss",
}
"""The templates of the package ``trl`` with calls of tools, and the format of each template."""
MISTRAL = {"v2": "mistral", "v3": "mistral", "v3_tekken": "mistral", "v7": "mistral", "v11": "mistral_id",
           "v13": "mistral_args"}  # fmt: skip
"""The versions of Mistral's tokenizers, and the format of each version."""
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<｜end▁of▁sentence｜>", "</s>")
"""The special tokens at the end of an assistant's message. They are no part of the stored text."""

Golden = dict[str, Any]


def main() -> int:
    """Renders all cases with all sources and writes the file. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="folder with the wheels of litellm and trl")
    parser.add_argument("--template", action="append", default=[], nargs=3, metavar=("FORMAT", "FILE", "SOURCE"),
                        help="another chat template")  # fmt: skip
    options = parser.parse_args()
    found = [*_libraries(options.wheels), *_templates_of_trl(options.wheels)]
    for tool_format, path, source in options.template:
        found += _rendered(tool_format, Path(path).read_text(encoding="utf-8"), source)
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in found)
    OUTPUT.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    sys.stdout.write(f"{OUTPUT}: {len(found)} texts of {len({one['format'] for one in found})} formats\n")
    return 0


def _libraries(wheels: Path) -> Iterator[Golden]:
    """Yields the texts of openai-harmony and of mistral-common."""
    (litellm,) = wheels.glob("litellm-*.whl")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(litellm) as archive:
        (Path(folder) / "o200k_base.tiktoken").write_bytes(archive.read(O200K))
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
        source = f"openai-harmony {version('openai-harmony')}"
        yield from (_golden("gpt_oss", source, case, harmony_text(case)) for case in CASES if not case.is_parallel)
    for name, tool_format in MISTRAL.items():
        source = f"mistral-common {version('mistral-common')}, tokenizer {name}"
        for case in CASES:
            if (text := mistral_text(name, case)) is not None:
                yield _golden(tool_format, source, case, text)


def _templates_of_trl(wheels: Path) -> Iterator[Golden]:
    """Yields the texts of the templates in the package trl."""
    (wheel,) = wheels.glob("trl-*.whl")
    release = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        for name, tool_format in TRL.items():
            path = f"trl/chat_templates/{name}.jinja"
            yield from _rendered(tool_format, archive.read(path).decode(), f"trl {release}, {path}")


def _rendered(tool_format: str, template: str, source: str) -> Iterator[Golden]:
    """Yields the texts that one chat template renders. Leaves out a case that the template refuses or shortens.

    Raises ValueError if our server would detect another format in the template.
    """
    formats = OutputFormat.of_template(template)
    detected = formats.tools and formats.tools.name
    if formats.template_has_tools and detected != tool_format:
        raise ValueError(f"{source}: {detected} is detected, not {tool_format}")
    environment = jinja2.Environment(  # noqa: S701  (the text is no HTML)
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda pattern: "1 Jan 2026"}
    compiled = environment.from_string(template)
    for case in CASES:
        question = [{"role": "user", "content": "Hello?"}]
        answer = case.message(arguments_are_text=formats.arguments_are_text)
        variables = {"tools": TOOLS, "bos_token": "", "eos_token": "</s>", "enable_thinking": False}
        try:
            before = compiled.render(messages=question, add_generation_prompt=False, **variables)
            whole = compiled.render(messages=[*question, answer], add_generation_prompt=False, **variables)
        except _RefusalError:
            continue
        if not whole.startswith(before):
            raise ValueError(f"{source}: the answer changes the text of the question")
        text = whole[len(before) :].strip()
        for head in ("<|im_start|>assistant", "<|start_header_id|>assistant<|end_header_id|>", "<｜Assistant｜>",
                     "<|header_start|>assistant<|header_end|>", "<|start|>assistant", "</think>"):  # fmt: skip
            text = text.removeprefix(head).removeprefix("\n").removeprefix("\n")
        for end in ENDS:
            text = text.removesuffix(end)
        is_whole = case.content in text and all(name in text for name, _ in case.calls)
        if tool_format == "pythonic" and case.name == "escapes":  # the template writes texts without quotes
            continue
        if not is_whole or (tool_format == "gpt_oss" and case.content):  # gpt-oss's template calls content reasoning
            continue
        yield _golden(tool_format, source, case, text)


def _golden(tool_format: str, source: str, case: Case, text: str) -> Golden:
    return {"format": tool_format, "source": source, "case": case.name, "text": text}


class _RefusalError(Exception):
    """The template does not render this case."""


def _refuse(message: str) -> None:
    raise _RefusalError(message)


if __name__ == "__main__":
    sys.exit(main())
