"""That no token stands for more characters than the bound says, and that some have no bound."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from gateway.bases.text_bound import characters_per_token_max

SHIPPED = Tokenizer.from_file(str(Path(__file__).parents[3] / "model_repo/default/tokenizer.json"))
COMPOSED = Tokenizer.from_str(SHIPPED.to_str())
COMPOSED.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
TEXTS = (
    st.text(max_size=200) | st.text("각 ế́", max_size=200) | st.just("the river and the gate " * 40)
)


@pytest.mark.parametrize("tokenizer", [SHIPPED, COMPOSED], ids=["shipped", "composed"])
@given(text=TEXTS)
def test_a_text_has_no_more_characters_than_its_tokens_can_stand_for(tokenizer, text: str):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(text) <= characters_per_token_max(tokenizer) * len(ids)


def test_the_shipped_bound_is_small_enough_to_be_of_use():
    assert 0 < characters_per_token_max(SHIPPED) <= 32


def lossy() -> list[Tokenizer]:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    unknown = Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    stripped = Tokenizer.from_str(SHIPPED.to_str())
    stripped.normalizer = normalizers.Strip()
    removed = Tokenizer.from_str(SHIPPED.to_str())
    removed.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    removed.decoder = decoders.ByteLevel()
    return [words, unknown, stripped, removed]


@pytest.mark.parametrize("tokenizer", lossy(), ids=["words", "unknown", "stripped", "removed"])
def test_a_tokenizer_that_drops_characters_has_no_bound(tokenizer: Tokenizer):
    assert characters_per_token_max(tokenizer) == 0
