"""Lab text from a checkpoint: spelling of prompts and tokens, streams, and one sentence for a bad checkpoint."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from dsflash_jax import cli, lab_text, steps
from dsflash_jax.config import ModelConfig
from dsflash_jax.generate import generate_tokens
from dsflash_jax.lab_text import encode_prompt, load_model, show_token, stream
from dsflash_jax.training import checkpoints
from dsflash_jax.training.vocabulary import FIRST_KEY, FIRST_VALUE, VOCAB_SIZE

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# Two layers compile fast; window, pages and top-k are small enough that 24 tokens overflow all three.
CFG = ModelConfig.from_json(CONFIGS / "lab.json").replace(
    num_hidden_layers=2, compress_ratios=(2, 1), kv_source_layer_ids=(0, 1), index_source_layer_ids=(0, 1),
    sliding_window=4, page_size=8, index_topk=4, max_position_embeddings=32, hc_sinkhorn_iters=1,
)  # fmt: skip
TEXT = "def f(x):\n ab"
PROMPT = encode_prompt(TEXT)  # 13 tokens
NEW = 11
ROWS = 4  # per prefill step: three whole chunks and one of a single token; every test uses this one compiled shape
SHORT = "ab("  # fills a step of 4 rows too, where the chunk size is the default


@pytest.fixture(scope="module")
def params():
    made = steps.init_params(CFG, 1)
    return {**made, "token_shift": made["token_shift"] + 0.5}  # zero at the start of training, it would hide a mistake


@pytest.fixture(scope="module")
def run_folder(params, tmp_path_factory):
    """A run's folder with one checkpoint, as training leaves it."""
    folder = tmp_path_factory.mktemp("run")
    trained = {name: value for name, value in params.items() if name != "freqs"}
    facts = {"config": CFG.to_dict(), "config_sha256": CFG.sha256()}
    checkpoints.save(folder / "checkpoints", 7, {"params": trained, "step": np.int32(7)}, facts)
    return folder


@pytest.mark.slow
def test_a_stream_is_lazy_and_yields_one_piece_per_token(params, run_folder):
    pieces = stream(run_folder, TEXT, NEW, prefill_rows=ROWS)
    new = list(generate_tokens(params, CFG, PROMPT, NEW, prefill_rows=ROWS))
    assert next(pieces) == show_token(new[0])
    assert list(pieces) == [show_token(token) for token in new[1:]]


@pytest.mark.parametrize("part", ["", "checkpoints", "checkpoints/step_00000007"])
def test_run_checkpoints_and_single_checkpoint_are_all_accepted(params, run_folder, part):
    loaded, cfg = load_model(run_folder / part)
    assert cfg == CFG
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for mine, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


def test_a_stream_ends_at_the_border_of_a_document(run_folder, monkeypatch):
    monkeypatch.setattr(lab_text, "generate_tokens", lambda *_: iter([65, 10, 0, 66]))
    assert list(stream(run_folder, TEXT, 4)) == ["A", "\n"]


@pytest.mark.slow
def test_drafts_are_asked_for_and_the_text_ends_at_a_border_all_the_same(run_folder, monkeypatch):
    """Drafts are asked for only where they are wanted."""
    asked = []
    monkeypatch.setattr(lab_text, "speculate_tokens", lambda *_, drafts: asked.append(drafts) or iter([65, 0, 66]))
    assert list(stream(run_folder, TEXT, 4, speculate=3)) == ["A"] and asked == [3]
    assert list(stream(run_folder, TEXT, 4, prefill_rows=ROWS)) and asked == [3]


@pytest.mark.slow
def test_a_checkpoint_with_draft_layers_streams_the_same_text_with_drafts(tmp_path, capsys):
    drafts = {"num_nextn_predict_layers": 1, "dspark_block_size": 3, "dspark_target_layer_ids": (1,)}
    drafts |= {"dspark_markov_rank": 4, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 1}
    cfg = CFG.replace(**drafts)
    arguments = ["generate", "--checkpoint", str(saved(tmp_path, cfg, steps.init_params(cfg, 1))), "--prompt", SHORT]
    printed = []
    for options in ([], ["--speculate", "3"]):
        assert cli.main([*arguments, "--tokens", "20", *options]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and len(printed[0]) > 1


def test_keys_and_values_are_written_as_they_are_printed():
    text = "a<k7>b<v12><v0>€"
    assert encode_prompt(text) == [97, FIRST_KEY + 7, 98, FIRST_VALUE + 12, FIRST_VALUE, 0x1A]
    assert "".join(map(show_token, encode_prompt(text))) == "a<k7>b<v12><v0>\N{REPLACEMENT CHARACTER}"
    assert encode_prompt("<k7 >") == [ord(c) for c in "<k7 >"]
    with pytest.raises(ValueError, match="prompt holds <v32>, the vocabulary has <v0> to <v31>"):
        encode_prompt("x<v32>")


def test_no_token_prints_a_control_character():
    for token in range(VOCAB_SIZE + 1):
        assert all(c.isprintable() or c in "\t\n" for c in show_token(token)), token
    assert [show_token(token) for token in (0x1B, 0x7F)] == ["␛", "␡"]


# -- checkpoints --


@pytest.fixture
def copy(run_folder, tmp_path):
    """A checkpoint of one's own to damage."""
    return Path(shutil.copytree(run_folder / "checkpoints" / "step_00000007", tmp_path / "step_00000007"))


def test_a_missing_checkpoint_is_named(tmp_path):
    (tmp_path / "step_00000007" / "state").mkdir(parents=True)  # without facts it is none
    for folder in (tmp_path / "nowhere", tmp_path / "step_00000007"):
        with pytest.raises(FileNotFoundError, match=f"checkpoint folder '{folder}' holds no complete checkpoint"):
            stream(folder, "x")


@pytest.mark.parametrize("lost", ["state", "facts/metadata", "state/manifest.ocdbt", "state/_METADATA"])
def test_a_checkpoint_with_a_lost_part_cannot_be_read(copy, lost):
    path = copy / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ValueError, match=rf"^checkpoint '{copy}' cannot be read: ") as refusal:
        stream(copy, "x")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("file", ["facts/metadata", "state/_METADATA"])
def test_a_checkpoint_with_a_cut_file_cannot_be_read(copy, file):
    (copy / file).write_bytes((copy / file).read_bytes()[:40])
    with pytest.raises(ValueError, match="cannot be read: "):
        stream(copy, "x")


def saved(folder, cfg, params, **facts):
    tree = {"params": {name: value for name, value in params.items() if name != "freqs"}}
    return checkpoints.save(folder, 1, tree, {"config": cfg.to_dict(), **facts})


def test_arrays_that_do_not_fit_the_configuration_are_named(params, tmp_path):
    wider = {**params, "norm": {"weight": np.ones(65, np.float32)}, "extra": np.ones(1, np.float32)}
    with pytest.raises(ValueError, match="not fit its own configuration: extra, norm.weight are missing, unknown or"):
        load_model(saved(tmp_path, CFG, wider))


def test_a_checkpoint_of_another_configuration_names_the_fields(run_folder):
    load_model(run_folder, CFG)
    with pytest.raises(ValueError, match=r"belongs to another run: config.index_topk is 4 there, 3 here"):
        load_model(run_folder, CFG.replace(index_topk=3))


def test_a_checkpoint_from_before_a_field_was_added_is_of_the_same_configuration(params, tmp_path):
    """A field that came later stands at its default, which was the only behaviour: the hash says so, too."""
    config = {key: value for key, value in CFG.to_dict().items() if key not in ("implementation", "interpret")}
    assert CFG.differences(config) == {}
    load_model(saved(tmp_path, CFG, params, config=config), CFG)


def test_a_checkpoint_that_is_not_of_training_is_refused(tmp_path):
    path = checkpoints.save(tmp_path, 1, {"weights": np.ones(2)}, {"config": CFG.to_dict()})
    with pytest.raises(ValueError, match="holds no configuration or no parameters"):
        load_model(path)


# -- command --


def test_command_prints_what_the_function_streams(run_folder, capsys):
    arguments = ["generate", "--checkpoint", str(run_folder), "--prompt", SHORT, "--tokens", "28"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == "".join(stream(run_folder, SHORT, 28)) + "\n"
    assert cli.main([*arguments, "--temperature", "1", "--top-k", "50", "--top-p", "0.95", "--seed", "2"]) == 0
    warm = stream(run_folder, SHORT, 28, temperature=1.0, seed=2, top_k=50, top_p=0.95)
    assert capsys.readouterr().out == "".join(warm) + "\n"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "<k99>"], "prompt holds <k99>"),
        (["--prompt", "x", "--tokens", "32"], "max_position_embeddings=32"),
        (["--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["--prompt", "x", "--top-p", "0"], "top_p=0.0"),
        (["--prompt", "x", "--seed", "18446744073709551616"], "seed=18446744073709551616"),
        (["--prompt", "x", "--tokens", "2", "--speculate", "2"], "a model without draft layers cannot draft"),
        (["--prompt", "x", "--speculate", "-2"], "speculate=-2 must be 0"),
    ],
)
def test_command_refuses_bad_input_in_one_sentence(run_folder, capsys, options, word):
    assert cli.main(["generate", "--checkpoint", str(run_folder), *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("dsflash: ") and word in printed.err
