"""Labels of bases that classify, and pairs of texts as one row."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import RobertaProcessing, TemplateProcessing

from gateway.bases.embedding import load_embedding_base
from gateway.bases.labels import Labels, pair_form, read_labels, sigmoid, softmax
from gateway.bases.slices import TooManyTokensError
from tests.support.scripted_embedder import write_embedding_base

CLASSIFIES = {"architectures": ["BertForSequenceClassification"]}
TEXTS = st.lists(st.from_regex(r"\A[abc ]{0,6}[abc]\Z"), min_size=1, max_size=4)


def test_a_base_without_the_head_has_no_labels() -> None:
    assert read_labels({"architectures": ["BertModel"], "id2label": {"0": "a"}}) is None
    assert read_labels({}) is None


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"id2label": {"1": "b", "0": "a"}}, ("a", "b")),
        ({"num_labels": 1}, ("LABEL_0",)),
        ({}, ("LABEL_0", "LABEL_1")),
    ],
)
def test_labels_have_the_names_of_the_config(config, names) -> None:
    assert read_labels(CLASSIFIES | config) == Labels(names)


def test_independent_labels_each_have_a_probability() -> None:
    labels = read_labels(CLASSIFIES | {"problem_type": "multi_label_classification"})
    assert labels is not None
    assert labels.probabilities([0.0, 100.0]) == pytest.approx([0.5, 1.0])
    assert Labels(("a", "b")).probabilities([0.0, 0.0]) == [0.5, 0.5]
    assert Labels(("a",)).probabilities([0.0]) == [0.5]


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=5))
def test_probabilities_are_finite_for_any_scores(scores) -> None:
    assert sum(softmax(scores)) == pytest.approx(1.0)
    assert all(0 <= sigmoid(it) <= 1 for it in scores)
    assert sigmoid(math.log(3)) == pytest.approx(0.75)


@given(TEXTS, TEXTS)
def test_joined_pairs_equal_the_pairs_of_the_tokenizer(pairing, first, second) -> None:
    tokenizer, form = pairing
    for one in first:
        for other in second:
            wanted = tokenizer.encode(one, other)
            ids = [tokenizer.encode(it, add_special_tokens=False).ids for it in (one, other)]
            row = form.joined(*ids)
            assert row == wanted.ids
            kinds = [int(0 < row.second_begins <= place) for place in range(len(row))]
            assert kinds == wanted.type_ids


@pytest.fixture(scope="module", params=["bert", "roberta", "bare"])
def pairing(request, tmp_path_factory):
    tokenizer = write_embedding_base(tmp_path_factory.mktemp("base"), dimensions=4)
    ends = {name: tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]")}
    if request.param == "roberta":
        tokenizer.post_processor = RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))
    elif request.param == "bare":
        tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B:1")
    assert ends == {"[CLS]": 2, "[SEP]": 3}
    return tokenizer, pair_form(tokenizer)


async def test_all_pairs_together_are_bounded(tmp_path) -> None:
    write_embedding_base(tmp_path, dimensions=4, labels=("a",))
    base = load_embedding_base(tmp_path)
    assert (base.dimensions, base.labels) == (1, Labels(("a",)))
    first, second = ["aaaa"] * 10, ["bbbb"] * 10
    rows = await base.encode_pairs(first, second, owner="t", tokens_max=64, total_max=800)
    assert len(rows) == 100
    with pytest.raises(TooManyTokensError):
        await base.encode_pairs(first, second, owner="t", tokens_max=64, total_max=799)
