"""Trains the tokenizer, a sentencepiece BPE model, and encodes documents with it.

There is no prefix space and no normalisation, and unknown characters become bytes. Therefore every text decodes to
itself. The special tokens are user-defined pieces, so that sentencepiece finds them in a rendered chat template as
``tokenizers`` does.
"""

import io
from collections.abc import Iterable

import sentencepiece as spm

from .corpus import Document

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (BOS, EOS, PAD, *ROLE_TOKENS.values())
UNK_ID, BOS_ID, EOS_ID, PAD_ID = 0, 1, 2, 3


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Returns the serialised sentencepiece model of ``texts``. Ids 0-6 are ``<unk>`` and special tokens, 7-262 are
    bytes.
    """
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=1.0,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=list(SPECIAL_TOKENS),
        unk_id=UNK_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        pad_id=PAD_ID,
        pad_piece=PAD,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def encode_document(tokenizer: spm.SentencePieceProcessor, document: Document) -> list[int]:
    """Returns the ids of a document as the chat template renders it. EOS ends every message and every plain text."""
    ids = [BOS_ID]
    for role, text in document:
        if role in ROLE_TOKENS:
            ids.append(tokenizer.PieceToId(ROLE_TOKENS[role]))
        ids += [*tokenizer.Encode(text), EOS_ID]
    return ids


def render(document: Document) -> str:
    """Returns the document as text with its special tokens, as the chat template renders it."""
    turns = (f"{ROLE_TOKENS.get(role, '')}{text}{EOS}" for role, text in document)
    return BOS + "".join(turns)


def merge_rules(tokenizer: spm.SentencePieceProcessor) -> list[tuple[str, str]]:
    """Returns the merges of the model, in the order in which the merged pieces were learned.

    A piece can result from several merges: every division of the piece into two other pieces is a merge.

    sentencepiece gives the n-th learned piece the score -n, and applies the merge with the best score first.
    ``tokenizers`` does the same with the rank of a merge.
    """
    ordinary = (i for i in range(tokenizer.GetPieceSize()) if not (tokenizer.IsByte(i) or tokenizer.IsUnknown(i)))
    ids = {piece: i for i in ordinary if (piece := tokenizer.IdToPiece(i)) not in SPECIAL_TOKENS}
    rules = []
    for piece in sorted(ids, key=lambda p: -tokenizer.GetScore(ids[p])):
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        rules += sorted((s for s in splits if s[0] in ids and s[1] in ids), key=lambda s: (ids[s[0]], ids[s[1]]))
    return rules
