"""The demonstration: a small byte-level decoder learns Python's own source, without downloads."""

import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from recipes.catalog import DEMONSTRATION_MODEL

CORPUS_BYTES = 2_000_000  # at most, counted as characters
HELD_OUT_EVERY = 20

END_OF_TEXT, PADDING, TURN_START, TURN_END = "<|endoftext|>", "<|padding|>", "<|im_start|>", "<|im_end|>"


def demo_corpus() -> list[str]:
    """Return single-file modules of the standard library, in the same order on every rank."""
    texts, room = [], CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if text and len(text) <= room:
            texts.append(text)
            room -= len(text)
    return texts


def held_out(texts: list[str]) -> tuple[list[str], list[str]]:
    """Split off every twentieth text for evaluation, so both splits have modules from A to Z."""
    kept = [text for number, text in enumerate(texts, start=1) if number % HELD_OUT_EVERY]
    return kept, texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]


def demo_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with four special tokens. Decoding is lossless."""
    # Each byte is written as one printable character.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([END_OF_TEXT, PADDING, TURN_START, TURN_END])
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        extra_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,  # "a ." stays "a ."
        model_max_length=1024,
    )


def demo_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Return a config of 0.7 million parameters. Two CPU cores train the model in a minute."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=DEMONSTRATION_MODEL["max_position_embeddings"],
        # The usual 0.02 suits wide models. With 0.02, this narrow model learns half as fast.
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,  # texts begin with their first byte
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
