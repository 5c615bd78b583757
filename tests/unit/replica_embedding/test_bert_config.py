import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from replica.embedding.bert import read_bert_config
from replica.embedding.engine import load_embedding
from replica.engine.artifact import ArtifactError
from replica.engine.safetensors import read_safetensors, write_safetensors
from tests.support.random_bert import TINY


@pytest.fixture
def base(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "base"))


def change(path: Path, **fields) -> None:
    document = json.loads(path.read_text())
    changed = {name: value for name, value in (document | fields).items() if value != "absent"}
    path.write_text(json.dumps(changed))


def test_a_written_config_is_read(base: Path) -> None:
    assert read_bert_config(base) == TINY


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "roberta"}, "model_type 'roberta'"),
        ({"model_type": "absent"}, "model_type None"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"hidden_act": "absent"}, "hidden_act None"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"layer_norm_eps": "absent"}, "without layer_norm_eps"),
        ({"num_attention_heads": 5}, "hidden_size 32 with num_attention_heads 5"),
        ({"is_decoder": True}, "is_decoder True"),
        ({"embedding_size": 16}, "embedding_size 16"),
    ],
)
def test_a_config_the_graph_does_not_compute_is_refused(base, fields, words) -> None:
    change(base / "config.json", **fields)
    with pytest.raises(ArtifactError, match=words):
        read_bert_config(base)


def test_absent_and_harmless_fields_are_no_problem(base: Path) -> None:
    change(base / "config.json", position_embedding_type="absent", is_decoder=False, use_cache=True)
    assert read_bert_config(base) == TINY


def test_other_poolings_and_modules_are_refused(base: Path) -> None:
    change(base / "1_Pooling/config.json", pooling_mode_cls_token=True)
    with pytest.raises(ArtifactError, match=r"pooling_mode_cls_token.*in 1_Pooling/config\.json"):
        read_bert_config(base)
    modules = json.loads((base / "modules.json").read_text())
    (base / "modules.json").write_text(json.dumps([modules[0], modules[1]]))
    with pytest.raises(ArtifactError, match="modules Transformer, Pooling in"):
        read_bert_config(base)
    (base / "modules.json").unlink()
    with pytest.raises(ArtifactError, match="does not list modules"):
        read_bert_config(base)


def test_texts_that_would_have_to_be_changed_are_refused(base: Path) -> None:
    change(base / "sentence_bert_config.json", do_lower_case=True)
    with pytest.raises(ArtifactError, match="do_lower_case True"):
        read_bert_config(base)
    change(base / "sentence_bert_config.json", do_lower_case=False, max_seq_length="absent")
    with pytest.raises(ArtifactError, match="without max_seq_length"):
        read_bert_config(base)


def test_a_checkpoint_must_fit_to_its_config(base: Path) -> None:
    path = base / "model.safetensors"
    tensors = {name: array.copy() for name, array in read_safetensors(path).items()}
    harmless = {"pooler.dense.weight": np.zeros((32, 32), np.float32)}
    write_safetensors(path, tensors | harmless)
    load_embedding(base, {})
    write_safetensors(path, tensors | {"lm_head.weight": np.zeros(1, np.float32)})
    with pytest.raises(ArtifactError, match=r"also holds lm_head\.weight"):
        load_embedding(base, {})
    del tensors["encoder.layer.1.output.dense.bias"]
    write_safetensors(path, tensors)
    with pytest.raises(ArtifactError, match=r"lacks encoder\.layer\.1\.output\.dense\.bias"):
        load_embedding(base, {})


def test_half_precision_weights_are_read_as_half_precision(base: Path, reference) -> None:
    path = base / "model.safetensors"
    tensors = {name: array.astype(np.float16) for name, array in read_safetensors(path).items()}
    write_safetensors(path, tensors)
    engine = load_embedding(base, {})
    vectors = engine.embed([np.array([[5, 6, 7]], np.int32)]).outcomes[0]
    assert np.abs(vectors[0] - reference(base, [5, 6, 7])).max() < 1e-5
