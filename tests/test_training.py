"""The training loop: exact whatever it is cut into or killed by, and clear about what it did."""

from __future__ import annotations

import csv
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ligermodels import CheckpointError, LigerError, LigerLlama, LlamaConfig
from ligermodels.training import checkpoint as checkpoint_file
from ligermodels.training.checkpoint import STATE, Checkpoints, StopSignal
from ligermodels.training.data import Document, Loader
from ligermodels.training.log import FIELDS, flops, plot, read_log
from ligermodels.training.loop import Interrupted, Settings, backward, evaluate, train
from ligermodels.training.lora import add_lora, lora_modules, save_adapter
from ligermodels.training.optimizer import AdamW
from ligermodels.training.schedule import SCHEDULES, schedule

SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SHORT = Settings(steps=10, batch=2, seq=16, accumulation=2, lr=1e-2, save_every=4, log_every=3)


def make_model(dtype=torch.float32, seed=0, **config):
    torch.manual_seed(seed)
    return LigerLlama(LlamaConfig(**{**SIZES, **config})).to(dtype)


def make_data(**options):
    """Documents of unequal length of which some tokens are not learnt."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 15, (40,), generator=generator).tolist()
    source = [{"ids": torch.randint(3, 97, (n,), generator=generator).tolist()} for n in lengths]

    def encode(record):
        ids = record["ids"]
        return Document(ids, [-100 if i % 5 == 0 and len(ids) > 3 else i for i in ids])

    return Loader(source, encode, **{"batch": 2, "seq": 16, "window": 6, **options})


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --------------------------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_batch_may_be_cut_anywhere(rows):
    """Micro-batches of unequal numbers of supervised tokens give the gradient of the whole."""
    model = make_model()
    whole = next(make_data(batch=6, shuffle=False))
    parts = list(itertools.islice(make_data(batch=rows, shuffle=False), 6 // rows))
    assert sum(b.supervised for b in parts) == whole.supervised
    assert rows == 3 or len({b.supervised for b in parts}) > 1
    loss = backward(model, [whole])
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.testing.assert_close(backward(model, parts), loss, rtol=1e-6, atol=1e-6)
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-5, atol=1e-7)
    ids, labels, bounds, *_ = whole
    torch.testing.assert_close(model(ids, labels=labels, cu_seqlens=bounds).loss, loss, rtol=1e-6, atol=1e-6)


def test_the_evaluation_loss_is_the_mean_over_tokens():
    model = make_model().train()
    batches = list(make_data(shuffle=False, epochs=1))
    with torch.no_grad():
        losses = [model(b.input_ids, labels=b.labels, cu_seqlens=b.cu_seqlens).loss.item() for b in batches]
    counts = [b.supervised for b in batches]
    expected = sum(x * n for x, n in zip(losses, counts, strict=True)) / sum(counts)
    assert evaluate(model, batches) == pytest.approx(expected, rel=1e-6) and model.training


# ------------------------------------------------------------------------------------------------------------ optimiser


def test_master_weights_keep_what_bf16_rounds_away():
    losses = {}
    for name, dtype, master in (("fp32", torch.float32, True), ("master", torch.bfloat16, True),
                                ("pure", torch.bfloat16, False)):  # fmt: skip
        model, data = make_model(dtype), make_data()
        optimizer = AdamW(model, master=master)
        start = weights(model)
        for _ in range(60):
            loss = backward(model, [next(data)])
            optimizer.step(2e-5)
        losses[name] = evaluate(model, list(make_data(epochs=1, shuffle=False)))
        moved = [(p.float() - start[n].float()).abs().sum() for n, p in model.named_parameters() if "norm" in n]
        assert (sum(moved) > 0) == (name == "fp32")  # norm weights of 1: an update of 2e-5 is below bf16's step
        if name == "master":
            masters = [m for n, m in optimizer.masters.items() if "norm" in n]
            assert all((m != 1).any() for m in masters)  # but is not lost
    assert loss.isfinite()
    assert abs(losses["master"] - losses["fp32"]) < abs(losses["pure"] - losses["fp32"])


def test_gradients_of_micro_batches_are_added_in_fp32_and_freed():
    model, data = make_model(torch.bfloat16), make_data()
    optimizer = AdamW(model)
    batches = [next(data) for _ in range(3)]
    count = sum(b.supervised for b in batches)
    total = {}
    plain = make_model(torch.bfloat16)
    for b in batches:
        options = dict(labels=b.labels, cu_seqlens=b.cu_seqlens, num_items_in_batch=count)
        model(b.input_ids, **options).loss.backward()
        plain(b.input_ids, **options).loss.backward()
        for name, p in plain.named_parameters():
            total[name] = total.get(name, 0) + p.grad.float()
        plain.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(optimizer.masters[name].grad, g) for name, g in total.items())


def test_the_step_is_torchs_own_with_clipping_and_no_decay_of_norms():
    ours, theirs = make_model(), make_model()
    optimizer = AdamW(ours, weight_decay=0.5)
    groups = [
        {"params": [p for p in theirs.parameters() if (p.dim() > 1) == matrix], "weight_decay": 0.5 * matrix}
        for matrix in (True, False)
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    data = make_data()
    for _ in range(3):
        batch = next(data)
        backward(ours, [batch]), backward(theirs, [batch])
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        torch.testing.assert_close(optimizer.step(0.01, clip=0.5), expected)
        reference.step(), reference.zero_grad()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_tied_weight_is_updated_once():
    model = make_model(torch.bfloat16, tie_word_embeddings=True)
    optimizer = AdamW(model)
    assert "lm_head.weight" not in optimizer.masters
    backward(model, [next(make_data())])
    optimizer.step(1e-2)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, optimizer.masters["model.embed_tokens.weight"].bfloat16())


def test_a_frozen_model_has_nothing_to_train():
    with pytest.raises(LigerError, match="no parameter that requires a gradient"):
        AdamW(make_model().requires_grad_(False))


# ------------------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_rise_stay_and_end_where_they_should(kind):
    shares = [schedule(i, 100, kind=kind, warmup=10, final=0.1) for i in range(100)]
    assert shares[0] == pytest.approx(0.1) and shares[9] == max(shares) == 1.0
    assert all(a >= b for a, b in itertools.pairwise(shares[9:]))
    assert shares[-1] == pytest.approx(1.0 if kind == "constant" else 0.1)
    if kind == "cosine":
        assert shares[54] == pytest.approx(0.55)
    if kind == "linear":
        assert shares[54] == pytest.approx(0.55)
    if kind == "wsd":
        assert shares[79] == 1.0 > shares[80] and shares[84] == pytest.approx(1 - 0.9 * math.sqrt(0.25))
    assert schedule(0, 1, kind=kind) == (1.0 if kind == "constant" else pytest.approx(0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(schedule="cosin"), "schedule must be one of cosine, wsd"),
        (dict(steps=10, warmup=6, schedule="wsd", decay=5), "warmup . decay must not exceed the steps"),
        (dict(steps=0), "steps must be at least 1, found 0"),
        (dict(lr=0.0), "lr and clip must be above 0"),
        (dict(lr=math.nan), "lr and clip must be above 0"),
        (dict(lr=math.inf), "lr and clip must be above 0"),
        (dict(weight_decay=math.nan), "weight_decay and save_every not below"),
        (dict(steps=1.5), "steps must be int, found 1.5"),
        (dict(batch=True), "batch must be int"),
        (dict(lr="1e-3"), "lr must be float, found '1e-3'"),
        (dict(seed=2**80), "seed must be"),
    ],
)
def test_settings_that_make_no_run_are_named(options, message):
    with pytest.raises(LigerError, match=message):
        Settings(**options)


# ------------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("kind", ["fp32", "bf16 with masters", "pure bf16", "lora with dropout"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(kind, tmp_path):
    settings = replace(SHORT, master=kind != "pure bf16")

    def run(out, resume=False, stop_at=None):
        model = make_model(torch.float32 if kind == "fp32" else torch.bfloat16, seed=7 if resume else 0)
        if resume and kind == "lora with dropout":
            model.load_state_dict(make_model(torch.bfloat16).state_dict())  # the base is the same model again
        if kind == "lora with dropout":
            add_lora(model, rank=2, dropout=0.2)
        data, write = make_data(), None
        if lora_modules(model):
            write = lambda folder: save_adapter(model, folder)  # noqa: E731
        if stop_at:
            encode, seen = data.encode, itertools.count()

            def dies(record):
                if next(seen) == stop_at:
                    raise KeyboardInterrupt  # as a kill: nothing is saved
                return encode(record)

            data.encode = dies
        return train(model, data, settings, out, write=write, resume=resume), weights(model)

    losses, final = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", stop_at=60)
    assert Checkpoints(tmp_path / "killed").latest().name == "checkpoint-00000004"
    again, final_again = run(tmp_path / "killed", resume=True)
    assert again == losses and len(losses) == 10 and losses[-1] < losses[0]
    assert equal(final, final_again)
    whole, killed = (read_log(tmp_path / name / "log.csv") for name in ("whole", "killed"))
    for a, b in zip(whole, killed, strict=True):
        assert all(a[f] == b[f] for f in ("step", "loss", "lr", "grad_norm", "tokens"))


def test_resuming_before_the_first_checkpoint_starts_over(tmp_path):
    losses = train(make_model(), make_data(), SHORT, tmp_path / "a", resume=True)
    assert losses == train(make_model(), make_data(), SHORT, tmp_path / "b")


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    train(make_model(), make_data(), SHORT, tmp_path)
    with pytest.raises(LigerError, match=r"holds a finished run, its result is .*final: give another folder"):
        train(make_model(), make_data(), SHORT, tmp_path)
    shutil.rmtree(tmp_path / "final")
    with pytest.raises(LigerError, match=r"holds a run already: resume it \(--resume\), or give another folder"):
        train(make_model(), make_data(), SHORT, tmp_path)


def test_other_data_is_refused_where_nothing_is_resumed(tmp_path):
    with pytest.raises(LigerError, match=r"other_data \(--other-data\) is for a run that goes on"):
        train(make_model(), make_data(), SHORT, tmp_path, other_data=True)


def test_another_run_is_not_resumed(tmp_path):
    train(make_model(), make_data(), SHORT, tmp_path)
    with pytest.raises(LigerError, match=r"other settings: lr was 0.01 and is 0.02, seed was 0 and is 1"):
        train(make_model(), make_data(), replace(SHORT, lr=0.02, seed=1), tmp_path, resume=True)
    wide = make_model(num_key_value_heads=2)
    with pytest.raises(LigerError, match=r"model made otherwise: num_key_value_heads was 4 and is 2"):
        train(wide, make_data(), SHORT, tmp_path, resume=True)
    with pytest.raises(LigerError, match=r"k_proj.weight is \(32, 32\) there and \(16, 32\) here, 4 differ"):
        AdamW(wide).load_state_dict(AdamW(make_model()).state_dict())
    with pytest.raises(LigerError, match=r"in torch.float32, this run in torch.bfloat16"):
        AdamW(make_model(torch.bfloat16), master=False).load_state_dict(AdamW(make_model()).state_dict())
    with pytest.raises(LigerError, match=r"model made otherwise: rms_norm_eps was 1e-06 and is 0.1$"):
        train(make_model(rms_norm_eps=0.1), make_data(), SHORT, tmp_path, resume=True)
    with pytest.raises(LigerError, match=r"model made otherwise: turns was absent and is last$"):
        train(make_model(), make_data(), SHORT, tmp_path, resume=True, made={"turns": "last"})
    free = replace(SHORT, log_every=1, save_every=0, keep=1, eval_every=3)
    with pytest.raises(LigerError, match=r"holds a finished run, its result is .*final: give another folder"):
        train(make_model(), make_data(), free, tmp_path, resume=True)
    shutil.rmtree(tmp_path / "final")  # as if it had been killed before its end
    assert len(train(make_model(), make_data(), free, tmp_path, resume=True)) == 10


def test_an_adapter_is_not_resumed_on_another_base(tmp_path):
    def run(seed, **more):
        model = make_model(seed=seed)
        add_lora(model, rank=2)
        return train(model, make_data(), SHORT, tmp_path, write=lambda folder: save_adapter(model, folder), **more)

    run(0)
    with pytest.raises(LigerError, match=r"model made otherwise: frozen weights was \w{8} and is \w{8}$"):
        run(1, resume=True)


def test_a_start_that_failed_before_its_first_step_is_no_run(tmp_path):
    def broken(record):
        raise LigerError("broken")

    data = make_data(strict=True)
    data.encode = broken
    with pytest.raises(LigerError, match="broken"):
        train(make_model(), data, SHORT, tmp_path)
    assert (tmp_path / "log.csv").exists()
    assert len(train(make_model(), make_data(), SHORT, tmp_path)) == 10


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_a_kill_during_a_save_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, {"value": 1}, lambda folder: (folder / "model").write_text("four"))
    stages = ["write", "save", "_flush", "rename"]
    for stage in stages:
        with monkeypatch.context() as patch:

            def killed(*args, **kwargs):
                raise KeyboardInterrupt

            write = killed if stage == "write" else lambda folder: (folder / "model").write_text("five")
            if stage == "save":
                patch.setattr(torch, "save", killed)
            elif stage == "_flush":
                patch.setattr(checkpoint_file, "_flush", killed)
            elif stage == "rename":
                patch.setattr(Path, "rename", killed)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save(5, {"value": 2}, write)
        assert [p.name for p in checkpoints.all()] == ["checkpoint-00000004"]
        assert checkpoints.load() == {"step": 4, "value": 1}
        assert (checkpoints.latest() / "model").read_text() == "four"
    checkpoints.save(5, {"value": 2}, lambda folder: None)
    assert checkpoints.load() == {"step": 5, "value": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-00000004", "checkpoint-00000005"]


def test_the_newest_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (9, 10, 11, 100_000_000):
        checkpoints.save(step, {}, lambda folder: None)
    assert [p.name for p in checkpoints.all()] == ["checkpoint-00000011", "checkpoint-100000000"]


def test_a_full_disk_is_reported_and_costs_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {}, lambda folder: None)

    def full(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"checkpoint-00000002: the checkpoint could not be written.*No space"):
        checkpoints.save(2, {}, full)
    assert checkpoints.load()["step"] == 1


def test_a_broken_state_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        Checkpoints(tmp_path).load()
    path = Checkpoints(tmp_path).save(1, {}, lambda folder: None)
    (path / STATE).write_bytes(b"no state")
    with pytest.raises(
        CheckpointError,
        match=r"training_state.pt: not a state that can be resumed .* Remove .* to resume from the one before",
    ):
        Checkpoints(tmp_path).load()


def test_a_checkpoint_is_a_model_folder(tmp_path):
    model = make_model()
    train(model, make_data(), SHORT, tmp_path)
    for name in ("checkpoint-00000004", "checkpoint-00000008", "final"):
        loaded = LigerLlama.from_pretrained(tmp_path / name)
        assert equal(weights(loaded), weights(model)) == (name == "final")
    assert not list(tmp_path.glob(".partial*"))


RUN = """
import sys
sys.path.insert(0, {tests!r})
import torch, test_training as t
torch.set_num_threads(1)
t.train(t.make_model(), t.make_data(), t.replace(t.SHORT, **{settings!r}), {out!r})
"""


def run_and_signal(number, out, lines, **settings):
    """A run in a real process, which gets a signal once its log is so long; returns what it wrote to stderr."""
    script = RUN.format(tests=str(Path(__file__).parent), settings=settings, out=str(out))
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, env=environment)
    log = out / "log.csv"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (log.exists() and len(log.read_text().splitlines()) > lines):
        time.sleep(0.01)
    process.send_signal(number)
    return process.communicate(timeout=60)[1]


def test_a_terminated_run_saves_and_stops(tmp_path):
    errors = run_and_signal(signal.SIGTERM, tmp_path, 3, steps=100_000, save_every=0, log_every=1)
    assert "Interrupted: " in errors, errors[-2000:]
    step = Checkpoints(tmp_path).load()["step"]
    assert f"Interrupted: SIGTERM: stopped after step {step}, resume from {tmp_path}" in errors
    assert "\nSIGTERM: stopping after this step, a second one stops at once\n" in errors  # at once, a step may be long
    assert [row["step"] for row in read_log(tmp_path / "log.csv")] == list(range(1, step + 1))


def test_a_run_killed_at_any_moment_goes_on_as_if_nothing_had_happened(tmp_path):
    """It saves all the time, so the kill comes during a save as likely as not."""
    settings = dict(steps=40, save_every=1, log_every=1)
    run_and_signal(signal.SIGKILL, tmp_path / "killed", 8, **settings)
    step = Checkpoints(tmp_path / "killed").load()["step"]
    assert 7 <= step < 40
    again = train(make_model(), make_data(), replace(SHORT, **settings), tmp_path / "killed", resume=True)
    settings["save_every"] = 0
    assert again == train(make_model(), make_data(), replace(SHORT, **settings), tmp_path / "whole")
    assert not list((tmp_path / "killed").glob(".partial*"))


def test_ctrl_c_finishes_the_step_and_a_second_one_does_not_wait(tmp_path):
    data = make_data()
    encode, seen = data.encode, itertools.count()

    def presses(record):
        if next(seen) == 60:
            signal.raise_signal(signal.SIGINT)
        return encode(record)

    data.encode = presses
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"SIGINT: stopped after step \d+, resume from .*checkpoint-"):
        train(make_model(), data, SHORT, tmp_path)
    assert signal.getsignal(signal.SIGINT) is handler
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.received == signal.SIGINT and signal.getsignal(signal.SIGINT) is handler


# -------------------------------------------------------------------------------------------------------- what it tells


def test_the_log_has_a_line_a_step_and_the_plot_is_drawn(tmp_path):
    evaluation = list(make_data(epochs=1, shuffle=False))
    losses = train(make_model(), make_data(), replace(SHORT, eval_every=4), tmp_path, evaluation=evaluation)
    with open(tmp_path / "log.csv") as file:
        assert tuple(next(csv.reader(file))) == FIELDS
    rows = read_log(tmp_path / "log.csv")
    assert [row["step"] for row in rows] == list(range(1, 11)) and [row["loss"] for row in rows] == losses
    assert [row["step"] for row in rows if row["eval_loss"] is not None] == [4, 8, 10]
    assert all(row["tokens_per_s"] > 0 and row["memory_gib"] > 0 and row["mfu"] is None for row in rows)
    data = make_data()
    assert rows[-1]["tokens"] == sum(next(data).tokens for _ in range(20))
    assert "<svg" in (tmp_path / "loss.svg").read_text()


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    train(make_model(), make_data(), SHORT, tmp_path)
    path = tmp_path / "log.csv"
    path.write_text(path.read_text() + "11,3.5,,0.0")
    assert len(read_log(path)) == 10
    assert plot(tmp_path) == tmp_path / "loss.svg"


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = train(make_model(), make_data(), SHORT, tmp_path, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(losses)
    assert "eval_loss" not in events.Tags()["scalars"]


def test_flops_are_those_of_the_weights_that_train():
    model = make_model()
    linear = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n)
    assert flops(model) == (6 * linear, 6 * 2 * 32)
    names = add_lora(model, rank=2, targets=["q_proj"])
    added = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    assert len(names) == 2 and flops(model) == (4 * linear + 6 * added, 6 * 2 * 32)


def test_a_loss_that_is_not_finite_stops_the_run_and_makes_no_checkpoint(tmp_path):
    model, data = make_model(), make_data()
    encode, seen = data.encode, itertools.count()

    def poison(record):
        if next(seen) == 60:
            model.model.norm.weight.data.fill_(math.nan)
        return encode(record)

    data.encode = poison
    with pytest.raises(LigerError, match=r"step \d+: the loss is nan, the norm of its gradient nan"):
        train(model, data, replace(SHORT, log_every=100), tmp_path)
    last = read_log(tmp_path / "log.csv")
    first_bad = next(row["step"] for row in last if math.isnan(row["loss"]))
    assert Checkpoints(tmp_path).load()["step"] < first_bad
    assert not (tmp_path / "final").exists()


def test_a_finished_run_without_a_checkpoint_is_not_trained_again(tmp_path):
    train(make_model(), make_data(), replace(SHORT, save_every=0), tmp_path)
    with pytest.raises(LigerError, match="holds a finished run"):
        train(make_model(), make_data(), replace(SHORT, save_every=0), tmp_path, resume=True)


def test_the_last_update_takes_the_micro_batches_that_are_left(tmp_path):
    count = sum(1 for _ in make_data(epochs=1))
    settings = replace(SHORT, steps=2, accumulation=count - 1)
    assert len(train(make_model(), make_data(epochs=1), settings, tmp_path)) == 2


def test_data_that_ends_is_said(tmp_path):
    with pytest.raises(LigerError, match="the data ended at step"):
        train(make_model(), make_data(epochs=1), SHORT, tmp_path)


# ---------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [False, True])
def test_a_step_on_a_gpu_never_waits_for_it_and_keeps_no_gradient_of_what_is_frozen(lora):
    torch.manual_seed(0)
    sizes = dict(SIZES, hidden_size=256, intermediate_size=512, vocab_size=4096)
    model = LigerLlama(LlamaConfig(**sizes)).to("cuda", torch.bfloat16)
    if lora:
        add_lora(model, rank=4, targets=["q_proj", "up_proj", "lm_head"], dtype="bfloat16")
    optimizer, data, losses = AdamW(model), make_data(batch=4, seq=128), []
    for step in range(30):
        batches = [next(data), next(data)]
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")  # the first steps compile, and look at ids
        try:
            losses.append(backward(model, batches))
            assert all(p.grad is None for p in model.parameters())  # in the fp32 copies already
            held = sum(m.grad.numel() for m in optimizer.masters.values() if m.grad is not None)
            optimizer.step(1e-3, clip=1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert held == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert losses[-1].item() < losses[0].item() - 0.1


@pytest.mark.gpu
def test_a_run_on_a_gpu_learns_and_resumes(tmp_path):
    def run(out, **options):
        model = make_model(torch.bfloat16, hidden_size=256, intermediate_size=512).to("cuda")
        return train(model, make_data(), replace(SHORT, steps=20), out, evaluation=[next(make_data())], **options)

    losses = run(tmp_path / "a")
    assert losses[-1] < losses[0] - 0.3
    rows = read_log(tmp_path / "a" / "log.csv")
    assert rows[-1]["eval_loss"] is not None and 0 < rows[-1]["memory_gib"] < 4
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "checkpoint-00000012").rename(tmp_path / "b" / "checkpoint-00000012")
    (tmp_path / "b" / "log.csv").write_bytes((tmp_path / "a" / "log.csv").read_bytes())
    assert run(tmp_path / "b", resume=True) == pytest.approx(losses, abs=2e-2)  # attention's backward adds in any order
