"""Names of models on a hub: ``owner/name``, ``hf:owner/name/file.gguf``, ``ms:owner/name@revision``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llm_serving.errors import HubError

HUGGING_FACE, MODEL_SCOPE = "hf", "ms"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(
    rf"(?:(?P<hub>{HUGGING_FACE}|{MODEL_SCOPE}):)?(?P<repository>{_PART}/{_PART})"
    r"(?:@(?P<revision>[A-Za-z0-9._-]{1,128}))?(?:/(?P<file>(?:[A-Za-z0-9._-]+/)*[A-Za-z0-9._-]+\.gguf))?"
)


@dataclass(frozen=True, slots=True)
class ModelName:
    """A parsed name: the hub, the repository, and optionally a revision and one GGUF file."""

    hub: str
    repository: str
    revision: str | None = None
    file: str | None = None

    @property
    def short(self) -> str:
        """The repository's name without its owner."""
        return self.repository.partition("/")[2]

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.hub}:{self.repository}{revision}" + (f"/{self.file}" if self.file else "")


def parse_model_name(text: str, option: str = "--model") -> ModelName | None:
    """Parses the name of a model. Returns None if ``text`` can only be a path. Raises HubError if ``text`` begins with
    ``hf:`` or ``ms:`` and is not a valid name. The error names ``option``, which has the value ``text``.

    A text without ``hf:`` or ``ms:`` is a name only in the form ``owner/name``. It names a model on Hugging Face.
    """
    has_hub = text.startswith((f"{HUGGING_FACE}:", f"{MODEL_SCOPE}:"))
    found = _NAME.fullmatch(text)
    if found is None or ".." in text:
        if has_hub:
            raise HubError(
                f"{option} {text}: expected hf:OWNER/NAME or ms:OWNER/NAME, and optionally @REVISION and /FILE.gguf"
            )
        return None
    if not has_hub and (found["file"] or found["revision"] or text.endswith(".gguf")):
        return None
    return ModelName(found["hub"] or HUGGING_FACE, found["repository"], found["revision"], found["file"])
