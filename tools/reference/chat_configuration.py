"""Generates docs/chat_configuration.md from the table of names of the importer."""

from __future__ import annotations

import json

from tools.chat_import.importing import values_in_words
from tools.chat_import.names import ABSENT, DEVICES, DO_SAMPLE, IMPORTED, Absent, Imported, Row, Target
from tools.chat_import.settings import MAX_BYTES, MAX_DEPTH
from tools.chat_import.writing import DEFAULTS

INTRODUCTION = """\
# Older `/chat` servers

For operators who replace an older `/chat` server of the MindSpore world by this one.

<!-- Written by tools/write_reference_docs.py from tools/chat_import. Edit there. -->

```sh
python tools/import_chat_configuration.py configuration.json --output chat.yaml
python start_server.py --config chat.yaml --check
```

The program makes a [config](configuration.md) from the `configuration.json` of the older server. **There is no public
description of this file.** The tables below have names that files of this kind commonly use. They come from public
servers: MindFormers' chat server and model configs, MindSpore llm-serving, MindIE, and ModelScope's
`configuration.json`. `--map` imports all other names.

- **Names.** Case, `_` and `-` do not matter: `maxSeqLen` is `max_seq_len`. A name counts in any object of the file,
  unless the table names the objects. A name of a [key](configuration.md) marked **P** in its section, for example
  `serving_config.server_port`, always means that key.
- **Nothing is left out silently.** Names that are not in the tables, wrong values, and names without a counterpart are
  errors. One message lists all of them, each with its remedy. Other settings without an effect are notes, and are
  listed in the comment of the config.
- **`--map NAME=SECTION.KEY`** imports a name as a key. `NAME` is a name, or a name with the objects around it, as in
  `server.port`.
- **`--ignore NAME`** leaves out a name, or an object with all its names.
- **`--set SECTION.KEY=VALUE`** gives a key a value, also instead of that of the file.
- **Two different values for a key** are an error that names both settings.
- **No value.** null and an empty text state no value.
- **Paths.** A relative path of a model, tokenizer or TLS file is searched in the folder of the `configuration.json`
  first. Then it is searched as in any config. If the file names no model, and its folder is a model folder, that folder
  is the model.
- **Check.** The server's loader must accept the config, otherwise nothing is written. So run the program on the machine
  that has the model and the device. An existing file is only replaced with `--force`.
- **Exit code.** 0: the config was written. 1: the file cannot be imported. 2: wrong usage.
"""
LIMITS = f"""\
- **Limits.** The file has at most {MAX_BYTES} bytes of UTF-8 and {MAX_DEPTH} nested levels, and no repeated keys.
  Passwords, API keys and access tokens are never shown.

Keys that the file does not state get these values, if they are not set:

"""


def chat_configuration_page() -> str:
    """Returns the page docs/chat_configuration.md."""
    defaults = "".join(f"- `{key}: {_yaml(value)}`\n" for key, value in DEFAULTS.items())
    imported = "".join(_imported_row(row) for row in IMPORTED)
    absent = "".join(_absent_row(row) for row in ABSENT)
    return (
        f"{INTRODUCTION}{LIMITS}{defaults}\n## Names that are imported\n\n"
        f"| names | key | values |\n|---|---|---|\n{imported}\n"
        "## Names without a counterpart\n\n"
        "A name with a value of the last column is a note. Any other value needs `--ignore`.\n\n"
        f"| names | reason | values that are a note |\n|---|---|---|\n{absent}"
    )


def _yaml(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _names(row: Row) -> str:
    parts = [", ".join(f"`{name}`" for name in row.names)] if row.names else []
    if row.short_names:
        inside = ", ".join(f"`{place}`" for place in row.places if place)
        where = [*(["at the top level"] if "" in row.places else []), *([f"in {inside}"] if inside else [])]
        parts.append(f"{', '.join(f'`{name}`' for name in row.short_names)} {' or '.join(where)}")
    return "; ".join(parts)


def _imported_row(row: Imported) -> str:
    keys = ", ".join(
        "`parallel_config.tensor_parallel` x `pipeline_parallel` x `data_parallel`"
        if target.key == DEVICES
        else f"`{target.key}`"
        for target in row.targets
    )
    return f"| {_names(row)} | {keys} | {_values(row.targets[0])} |\n"


def _values(target: Target) -> str:
    if target.conversion.allowed:
        return target.conversion.allowed
    if target.key == DEVICES:
        return "integer"
    return values_in_words(target.key)


def _absent_row(row: Absent) -> str:
    values = "all" if row.harmless is None else ", ".join(f"`{json.dumps(value)}`" for value in row.harmless)
    if row.samples:
        values = "; ".join([*([values] if values else []), f"all, if `{DO_SAMPLE}` in the same object is `false`"])
    return f"| {_names(row)} | {row.reason} | {values} |\n"
