"""`prove` agrees with honest runs, whatever ranks trained and wherever they were killed, and names what was changed."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import PIL
import pytest
import torch
from safetensors.torch import load_file, save_file

from dali_train.checkpoint.fingerprint import (
    draws_digest,
    evaluation_digest,
    evaluations_digest,
    order_digest,
    parsed,
    weights_digest,
    written,
)
from dali_train.checkpoint.run_directory import MANIFEST, MANIFEST_DIGEST, RunDirectory, checkpoint_paths
from dali_train.data.sampling.micro_batch import MicroBatch, MicroBatches
from dali_train.data.sampling.rng import DRAWS_VERSION
from dali_train.errors import ConfigError
from dali_train.extras.proof.prove import prove
from dali_train.extras.proof.replay import Recorded
from dali_train.extras.report.diff import compare_machines, compare_records, diff, samples_of
from dali_train.extras.report.runs import ReportedRun
from dali_train.runtime.status import read_status
from tests.conftest import REPOSITORY, StartTraining, Train, final_weights, finished_run, run_in_pool
from tests.helpers import events, kill_after_step_4

CHECKPOINTS = ("--run.checkpoint_every_steps", "2", "--run.eval_every_epochs", "None")
SUBJECTS = {"recipe", "order", "draws", "rates", "weights", "accuracy"}


@pytest.fixture(scope="module")
def proven_run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """7 steps with a line each, checkpoints of steps 2, 4, 6 and 7, evaluated at 4 and 7, and a moving average. It is
    only read."""
    options = (*CHECKPOINTS, "--run.eval_every_epochs", "2.5", "--ema.decay", "0.9")
    return finished_run(tmp_path_factory.mktemp("proven"), dataset, *options)


BRANCH = ("--schedule.name", "wsd", "--schedule.decay_epochs", "1.92")  # the last 3 of 7 steps, from the peak on


@pytest.mark.thorough
def test_a_branch_is_the_run_that_has_its_schedule_from_the_beginning(
    dataset: Path, tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    trunk = ("--schedule.name", "wsd", "--run.epochs", "20", "--run.max_steps", "4", *CHECKPOINTS)
    train("trunk", *trunk)
    resume = ("--run.resume", str(tmp_path / "trunk" / "checkpoints" / "step-00000004"))
    assert "resuming from step 4" in train("branch", *resume, *BRANCH, *CHECKPOINTS)
    straight = finished_run(tmp_path, dataset, *BRANCH, *CHECKPOINTS)
    branch = tmp_path / "branch"
    weights = final_weights(straight)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in final_weights(branch).items())
    rates = [event["lr"] for event in events(straight, "train")]
    assert rates[4] == rates[3] > rates[5] > rates[6]
    records = [[event["record"] for event in events(run, "train")][-3:] for run in (branch, straight)]
    assert records[0] == records[1]
    assert verdict(branch, capsys) == {} == verdict(straight, capsys)
    earlier = ("--schedule.name", "wsd", "--schedule.decay_epochs", "3")  # the last 5 of 7 steps
    refused = train("other", *resume, *earlier, status=2)
    assert "schedule.decay_epochs none -> 3" in refused and "choose another run.dir" in refused
    assert "the recipe differs" in train("trunk", *BRANCH, "--run.max_steps", "6", status=2)


def verdict(run: Path, capsys: pytest.CaptureFixture[str], dataset: Path | None = None) -> dict[str, str]:
    """What `prove` says of each subject that differs."""
    capsys.readouterr()
    agrees = prove(run, dataset=str(dataset) if dataset else None, all_draws=True)
    *printed, limits = capsys.readouterr().out.splitlines()
    assert "does not prove" in limits
    lines = [line.partition(" ") for line in printed]
    differing = {subject: text for subject, _, text in reversed(lines) if "DIFFERS" in text}
    assert agrees == (not differing) and {subject for subject, _, _ in lines} == SUBJECTS
    return differing


def micro_batches(run: Path) -> MicroBatches:
    return samples_of(RunDirectory(run).config)[1]


def edit_json(path: Path, *changes: tuple[str, Any]) -> None:
    values = json.loads(path.read_text())
    for name, value in changes:
        section, _, field = name.rpartition(".")
        (values[section] if section else values)[field] = value
    path.write_text(json.dumps(values))


def edit_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and its digest with it."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    change(manifest)
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    (checkpoint / MANIFEST_DIGEST).write_text(f"{digest}  {MANIFEST}\n")


def edit_records(run: Path, change: Callable[[int, str], str], places: str = "metrics checkpoints status") -> None:
    """Replace the record of each step in some or all places by what `change` makes of (step, record)."""
    if "metrics" in places:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if "record" in line:
                line["record"] = change(line["step"], line["record"])
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in checkpoint_paths(run / "checkpoints") if "checkpoints" in places else ():
        edit_manifest(path, lambda m: m["values"].update(record=change(m["step"], m["values"]["record"])))
    if "status" in places:
        status = json.loads((run / "status.json").read_text())
        edit_json(run / "status.json", ("record", change(status["step"], status["record"])))


def add_from(run: Path, step: int, *, order: int = 0, draws: int = 0) -> None:
    """Make the records what they would be if a step had had other digests: those of `step` steps and more."""

    def change(at: int, record: str) -> str:
        sums = parsed(record)
        return written(sums[0] + order, sums[1] + draws) if at >= step else record

    edit_records(run, change)


def digests(batch: MicroBatch) -> tuple[int, int]:
    return order_digest(batch.step, batch.k, batch.images), draws_digest(batch)


def exchange_a_sample(run: Path) -> None:
    batch = micro_batches(run)(3, 5)
    images = batch.images.copy()
    images[2] = (images[2] + 1) % 50
    add_from(run, 4, order=order_digest(3, 5, images) - order_digest(3, 5, batch.images))


def swap_two_images(run: Path) -> None:
    batch = micro_batches(run)(6, 0)
    add_from(run, 7, order=order_digest(6, 0, batch.images[[1, 0, 2, 3]]) - order_digest(6, 0, batch.images))


def leave_a_step_out(run: Path) -> None:
    sums = [digests(micro_batches(run)(2, k)) for k in range(8)]
    add_from(run, 3, order=-sum(order for order, _ in sums), draws=-sum(draws for _, draws in sums))


def repeat_a_micro_batch(run: Path) -> None:
    order, draws = digests(micro_batches(run)(0, 1))
    add_from(run, 1, order=order, draws=draws)


def flip_an_image(run: Path, step: int = 4) -> None:
    batch = micro_batches(run)(step, 7)
    before = draws_digest(batch)
    batch.flips[0] ^= 1
    add_from(run, step + 1, draws=draws_digest(batch) - before)


def mix_otherwise(run: Path) -> None:
    batch = micro_batches(run)(1, 0)
    before = draws_digest(batch)
    batch.lambdas[:] -= 0.01
    add_from(run, 2, draws=draws_digest(batch) - before)


def change_one_line(run: Path) -> None:
    edit_records(run, lambda step, record: written(1, 2) if step == 5 else record, "metrics")


def change_a_checkpoints_record(run: Path) -> None:
    edit_records(run, lambda step, record: written(1, 2) if step == 4 else record, "checkpoints")


def change_the_statuss_record(run: Path) -> None:
    edit_records(run, lambda step, record: written(1, 2), "status")


def train_with_another_seed(run: Path) -> None:
    """And write everything else as that run would have, but for its config."""
    config = RunDirectory(run).config.replace({"data.seed": 1})
    other = MicroBatches(samples_of(config)[0].rows, config)
    for step in range(7):
        for sign, source in ((-1, micro_batches(run)), (1, other)):
            sums = [digests(source(step, k)) for k in range(8)]
            add_from(run, step + 1, order=sign * sum(one for one, _ in sums), draws=sign * sum(two for _, two in sums))


def append_line(run: Path, **fields: Any) -> None:
    """Write the last line of a step again with other `fields`."""
    line = events(run, "train")[-1]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**line, **fields}) + "\n")


def cut(run: Path) -> None:
    for path in checkpoint_paths(run / "checkpoints")[2:]:
        shutil.rmtree(path)
    (run / "model.safetensors").unlink()
    keep_lines(run, lambda line: line["step"] <= 4 or line["event"] == "end")
    edit_json(run / "status.json", ("record", ""), ("weights", ""))
    (run / "epoch_accuracies.json").write_text(json.dumps(json.loads((run / "epoch_accuracies.json").read_text())[:1]))
    edit_json(run / "status.json", ("best_top1", events(run, "eval")[0]["ema_top1"]))
    edit_json(
        run / "status.json", ("evaluations", evaluations_digest({"4": evaluation_digest(events(run, "eval")[0])}))
    )


def keep_lines(run: Path, keeps: Callable[[dict[str, Any]], bool]) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if keeps(json.loads(line))))


def edit_weights(checkpoint: Path, *, hides: str = "", tensor: str = "model.head.bias", factor: float = 1.5) -> None:
    """Change a weight; `hides`: in the file's checksum, and in the digests of the weights."""
    file = next(path for path in checkpoint.glob("*.safetensors") if tensor in load_file(path))
    tensors = load_file(file)
    tensors[tensor] *= factor
    save_file(tensors, file, {"format": "pt"})  # DCP's own metadata is not needed to read complete tensors

    def change(manifest: dict[str, Any]) -> None:
        if "checksum" in hides:
            manifest["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        if "digest" in hides:
            model = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
            manifest["values"]["weights"][str(manifest["step"])]["model"] = weights_digest(model)

    edit_manifest(checkpoint, change)


def of_checkpoint(step: int, change: Callable[..., None], **options: Any) -> Callable[[Path], None]:
    return lambda run: change(run / "checkpoints" / f"step-{step:08d}", **options)


def forget_the_history(checkpoint: Path) -> None:
    edit_manifest(checkpoint, lambda manifest: manifest["values"]["weights"]["2"].update(model="0" * 64))


def edit_lines(run: Path, event: str, step: int, change: Callable[[dict[str, Any]], None]) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["event"] == event and line["step"] == step:
            change(line)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def of_line(event: str, step: int, **fields: Any) -> Callable[[Path], None]:
    return lambda run: edit_lines(run, event, step, lambda line: line.update(fields))


def without_field(event: str, step: int, name: str) -> Callable[[Path], None]:
    return lambda run: edit_lines(run, event, step, lambda line: line.pop(name))


def raise_the_accuracy(run: Path, *, digests: bool = False) -> None:
    """The last one, wherever it is; with `digests` also in status.json's digest of all evaluations."""
    for name in ("top1", "ema_top1"):
        edit_lines(run, "eval", 7, lambda line, name=name: line.update({name: 1.0}))
    accuracies = json.loads((run / "epoch_accuracies.json").read_text())
    (run / "epoch_accuracies.json").write_text(json.dumps([*accuracies[:-1], 1.0]))
    edit_json(run / "status.json", ("best_top1", 1.0))
    (run / "checkpoints" / "step-00000007" / "evaluation.json").write_text('{"top1": 1.0}')
    if digests:
        lines = {str(line["step"]): evaluation_digest(line) for line in events(run, "eval")}
        edit_json(run / "status.json", ("evaluations", evaluations_digest(lines)))


def raise_the_first_accuracy(run: Path) -> None:
    """Everywhere but in the digests of later checkpoints."""
    edit_lines(run, "eval", 4, lambda line: line.update(ema_top1=1.0))
    accuracies = [1.0, *json.loads((run / "epoch_accuracies.json").read_text())[1:]]
    (run / "epoch_accuracies.json").write_text(json.dumps(accuracies))
    (run / "checkpoints" / "step-00000004" / "evaluation.json").write_text('{"top1": 1.0}')
    edit_json(run / "status.json", ("best_top1", 1.0))
    for step in (6, 7):
        edit_manifest(
            run / "checkpoints" / f"step-{step:08d}", lambda manifest: manifest["values"].update(epoch_accuracies=[1.0])
        )
    lines = {str(line["step"]): evaluation_digest(line) for line in events(run, "eval")}
    edit_json(run / "status.json", ("evaluations", evaluations_digest(lines)))


def leave_out(*path: str) -> Callable[[Path], None]:
    """Remove an entry of the newest checkpoint's values."""

    def change(manifest: dict[str, Any]) -> None:
        section = manifest["values"]
        for name in path[:-1]:
            section = section[name]
        del section[path[-1]]

    return lambda run: edit_manifest(run / "checkpoints" / "step-00000007", change)


def empty_the_digest(run: Path) -> None:
    edit_manifest(
        run / "checkpoints" / "step-00000007", lambda manifest: manifest["values"]["weights"]["7"].update(model="")
    )


def offer_initial_weights(run: Path) -> None:
    """The weights of step 2 as a checkpoint of step 0."""
    offered = run / "checkpoints" / "step-00000000"
    shutil.copytree(run / "checkpoints" / "step-00000002", offered)

    def change(manifest: dict[str, Any]) -> None:
        manifest["step"] = 0
        manifest["values"]["weights"] = {"0": manifest["values"]["weights"]["2"]}
        manifest["values"]["record"] = events(run, "start")[0]["record"]

    edit_manifest(offered, change)


def replace_the_model(run: Path) -> None:
    tensors = load_file(run / "model.safetensors")
    tensors["head.bias"] = -tensors["head.bias"]
    save_file(tensors, run / "model.safetensors", {"format": "pt", "weights": "ema", "step": "7"})


TAMPERING: dict[str, tuple[Callable[[Path], None], dict[str, str]]] = {
    # What is done, and for each subject that differs what is named first.
    "a sample exchanged": (exchange_a_sample, {"order": "step 4 "}),
    "two images in another order": (swap_two_images, {"order": "step 7 "}),
    "a step left out": (leave_a_step_out, {"order": "step 3 ", "draws": "step 3 "}),
    "a micro-batch twice": (repeat_a_micro_batch, {"order": "step 1 ", "draws": "step 1 "}),
    "a flip": (flip_an_image, {"draws": "step 5 "}),
    "another lambda": (mix_otherwise, {"draws": "step 2 "}),
    "another seed in the config": (
        lambda run: edit_json(run / "config.json", ("data.seed", 1)),
        {"recipe": "data.seed 0 -> 1", "order": "step 1 ", "draws": "step 1 "},
    ),
    "trained with another seed": (train_with_another_seed, {"order": "step 1 ", "draws": "step 1 "}),
    "another learning rate": (
        lambda run: edit_json(run / "config.json", ("optimizer.lr", 0.02)),
        {"recipe": "optimizer.lr 0.01 -> 0.02", "rates": "lr of step 1 "},
    ),
    "one line": (change_one_line, {"order": "step 5 ", "draws": "step 5 "}),
    "the record of a checkpoint": (change_a_checkpoints_record, {"order": "step-00000004 .*step 4 "}),
    "the record in status.json": (change_the_statuss_record, {"order": "status.json .*step 7 "}),
    "the end cut off": (cut, {"order": "steps 5 to 7"}),
    "the beginning cut off": (lambda run: keep_lines(run, lambda line: line["step"] > 2), {"order": "steps 1 to 2"}),
    "a manifest": (
        lambda run: (run / "checkpoints" / "step-00000004" / MANIFEST).write_text("{}"),
        {"weights": "step-00000004"},
    ),
    "weights": (of_checkpoint(4, edit_weights), {"weights": "step-00000004"}),
    "weights, checksum": (of_checkpoint(6, edit_weights, hides="checksum"), {"weights": "step-00000006"}),
    "weights, checksum, digest": (of_checkpoint(4, edit_weights, hides="checksum digest"), {"weights": "step 4 "}),
    "the digests of older weights": (of_checkpoint(6, forget_the_history), {"weights": "step-00000006 .*step 2 "}),
    "the final model": (replace_the_model, {"weights": "model.safetensors .*step 7"}),
    "a digest left out": (leave_out("weights", "7"), {"weights": "step-00000007 .*step 7"}),
    "a section's digest left out": (leave_out("weights", "7", "ema"), {"weights": "step-00000007: .* ema"}),
    "an empty digest": (empty_the_digest, {"weights": "step-00000007"}),
    "other initial weights": (offer_initial_weights, {"weights": "step 0"}),
    "a learning rate": (of_line("train", 7, lr=0.5), {"rates": "lr of step 7 is 0.5"}),
    "an epoch": (of_line("train", 3, epoch=3.0), {"rates": "epoch of step 3 is 3.0"}),
    "a step beyond the end": (
        lambda run: append_line(run, step=10**14, epoch=1e13),
        {"recipe": "metrics.jsonl has a step", "order": "no record of steps 8 to "},
    ),
    "an accuracy in its line": (of_line("eval", 4, ema_top1=1.0), {"accuracy": "epoch_accuracies.json .*number 1 "}),
    "another number in its line": (of_line("eval", 7, top5=0.5), {"accuracy": "status.json has the digest"}),
    "an accuracy in epoch_accuracies.json": (
        lambda run: (run / "epoch_accuracies.json").write_text("[0.5, 1.0]"),
        {"accuracy": "epoch_accuracies.json .*number 1 "},
    ),
    "the accuracy in status.json": (
        lambda run: edit_json(run / "status.json", ("best_top1", 0.99)),
        {"accuracy": "status.json: best_top1 is 0.99"},
    ),
    "the accuracy beside a checkpoint": (
        lambda run: (run / "checkpoints" / "step-00000004" / "evaluation.json").write_text('{"top1": 0.99}'),
        {"accuracy": "step-00000004: top1 in evaluation.json is 0.99"},
    ),
    "the last accuracy, everywhere": (raise_the_accuracy, {"accuracy": "status.json has the digest"}),
    "an earlier accuracy, everywhere": (
        raise_the_first_accuracy,
        {"accuracy": "the evaluation of step 4 is not .* step-00000006"},
    ),
    "a digest of an evaluation left out": (
        leave_out("evaluations", "4"),
        {"accuracy": "step-00000007 has no digest of the evaluation of step 4"},
    ),
    "losses": (of_line("train", 4, loss=1.0, grad_norm=0.1, top1=1.0), {}),
    "times": (of_line("train", 4, step_s=1.0, images_per_second=1e6), {}),
    "the digest in status.json": (
        lambda run: edit_json(run / "status.json", ("weights", "0" * 64)),
        {"weights": "status.json .*step 7 "},
    ),
}


def test_each_row_of_the_documented_table_has_its_tampering() -> None:
    document = (REPOSITORY / "docs" / "exactness.md").read_text().partition("| of a run |")[2].partition("\n\n")[0]
    rows = set(re.findall(r"^\| (\w+) \|", document, re.MULTILINE))
    named = {subject for _, expected in TAMPERING.values() for subject in expected}
    assert named == SUBJECTS and rows == named | {"losses", "times"}  # of which `prove` sees nothing


@pytest.mark.parametrize("name", TAMPERING)
def test_what_was_changed_is_named(
    name: str, proven_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, expected = TAMPERING[name]
    run = tmp_path / "run"
    shutil.copytree(proven_run, run, symlinks=True)
    change(run)
    differing = verdict(run, capsys)
    assert differing.keys() == expected.keys(), differing
    for subject, named in expected.items():
        assert re.search(named, differing[subject]), differing


@pytest.mark.thorough
def test_an_honest_run_agrees_however_it_was_interrupted(
    train: Train,
    start_training: StartTraining,
    tiny_config: Path,
    tmp_path: Path,
    proven_run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Killed on 2 ranks, stopped on 3, finished on 1, logging otherwise: the record of the undisturbed run."""
    options = (*CHECKPOINTS, "--ema.decay", "0.9")
    kill_after_step_4(start_training, tiny_config, "killed", *options, "--hooks.log_every_steps", "3", ranks=2)
    assert verdict(tmp_path / "killed", capsys) == {}
    train("killed", *options, "--run.max_steps", "6", ranks=3)
    train("killed", *options, "--hooks.log_every_steps", "5")
    # On as many ranks the same bits, on another number the same but for rounding.
    assert replayed(tmp_path / "killed", 6, ranks=3) == {"loss", "gradient", "weights", "tensors"}
    assert replayed(tmp_path / "killed", 6) == {"there", "here", "loss", "gradient", "tensors"}
    for checkpoint in checkpoint_paths(tmp_path / "killed" / "checkpoints"):
        shutil.rmtree(checkpoint)
    assert verdict(tmp_path / "killed", capsys) == {}  # from the small files and the final model alone
    statuses = [read_status(run) for run in (proven_run, tmp_path / "killed")]
    assert statuses[0] and statuses[1] and statuses[0].record == statuses[1].record != ""
    assert verdict(proven_run, capsys) == {}


def replayed(run: Path, step: int | str, *, ranks: int = 1, status: int = 0) -> set[str]:
    """What ``prove --replay`` compares, or with status 1, what of it differs."""
    log = run.with_name("replay.log")
    log.unlink(missing_ok=True)
    printed = run_in_pool(["prove", str(run), "--replay", str(step)], log, ranks=ranks, status=status)
    lines = printed.partition("replayed ")[2].splitlines()[1:] if step != "eval" else printed.splitlines()
    print(printed)
    return {line.split()[0] for line in lines if status == 0 or "DIFFERS" in line}


def on_another_processor(run: Path) -> None:
    """Make the run's machine another one, in name."""
    content = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(content.replace(", CPU, ", ", CPU, another "))


def test_a_step_is_trained_again(proven_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(proven_run, run, symlinks=True)
    assert replayed(run, 2) == {"loss", "gradient", "weights", "tensors"}  # from the initial weights
    assert replayed(run, 5) == {"loss", "gradient"}
    # Whoever changes the newest checkpoint and its digests is not found by the digests.
    edit_weights(run / "checkpoints" / "step-00000007", hides="checksum digest")
    assert verdict(run, capsys) == {}
    assert replayed(run, 7, status=1) == {"weights", "tensors"}
    on_another_processor(run)
    assert replayed(run, 7, status=1) == {"tensors"}
    assert replayed(run, 6) == {"there", "here", "loss", "gradient", "tensors"}
    # What only a replay sees.
    of_line("train", 5, loss=1.0)(run)
    without_field("train", 5, "grad_norm")(run)
    assert replayed(run, 5, status=1) == {"loss", "gradient"}


@pytest.mark.thorough
def test_how_small_a_change_a_replay_sees_is_said(train: Train, tmp_path: Path) -> None:
    """In bf16 on another processor: a matrix changed by twice as much is named, one changed by a quarter is not."""
    run = tmp_path / "run"
    train("run", *CHECKPOINTS, "--run.max_steps", "2", "--precision.dtype", "bf16")
    on_another_processor(run)
    printed = run_in_pool(["prove", str(run), "--replay", "2"], tmp_path / "log")
    said = re.search(r"^tensors .*not seen are changes below (\S+) of model\.(\S+), and", printed, re.MULTILINE)
    assert said is not None, printed
    checkpoint = run / "checkpoints" / "step-00000002"
    for factor, status in ((1 + float(said[1]) / 4, 0), (1 + 2.5 * float(said[1]), 1)):
        edit_weights(checkpoint, hides="checksum digest", tensor=f"model.{said[2]}", factor=factor)
        assert "tensors" in replayed(run, 2, status=status)


def test_checkpoints_are_evaluated_again(proven_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An accuracy that was changed wherever it is, digests included, is not that of the weights."""
    run = tmp_path / "run"
    shutil.copytree(proven_run, run, symlinks=True)
    assert replayed(run, "eval") == {"accuracy"}
    on_another_processor(run)
    assert replayed(run, "eval") == {"there", "here", "accuracy"}
    shutil.rmtree(run)
    shutil.copytree(proven_run, run, symlinks=True)
    raise_the_accuracy(run, digests=True)
    assert verdict(run, capsys) == {}
    assert replayed(run, "eval", status=1) == {"accuracy"}
    of_line("eval", 7, loss=1.0)(run)
    on_another_processor(run)
    assert replayed(run, "eval", status=1) == {"accuracy"}


def test_a_change_of_the_recipe_is_named(train: Train, tmp_path: Path) -> None:
    train("run", *CHECKPOINTS, "--run.max_seconds", "0.001", status=75)
    train(
        "run", *CHECKPOINTS, *("--run.max_steps", "2", "--run.accept_changed_recipe", "true", "--optimizer.lr", "0.02")
    )
    log = tmp_path / "replay.log"
    for step in ("1", "2"):
        log.unlink(missing_ok=True)
        printed = run_in_pool(["prove", str(tmp_path / "run"), "--replay", step], log, status=2)
        assert "optimizer.lr 0.01 -> 0.02" in printed


@pytest.mark.thorough
def test_a_run_that_went_on_between_two_lines(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The means of its next line begin there, also if the checkpoint is gone; as a run of its own it agrees, too."""
    options = (*CHECKPOINTS, "--hooks.log_every_steps", "2")
    train("run", *options, "--run.max_seconds", "0.001", status=75)
    first = tmp_path / "run" / "checkpoints" / "step-00000001"
    train("other", *options, "--run.resume", str(first), "--run.max_steps", "3")
    assert verdict(tmp_path / "other", capsys) == {}
    flip_an_image(tmp_path / "other", step=0)
    assert verdict(tmp_path / "other", capsys).keys() == {"draws"}
    train("run", *options, "--run.max_steps", "2")
    shutil.rmtree(first)
    assert replayed(tmp_path / "run", 2) == {"loss", "gradient", "weights", "tensors"}


@pytest.mark.thorough
def test_a_step_that_overflowed_is_trained_again(train: Train, tmp_path: Path) -> None:
    """Its gradient norm is not a number, there as here, except in float64."""
    overflowing = ("--precision.dtype", "fp16", "--precision.initial_scale", "1e9", "--run.epochs", "10")
    train("run", *CHECKPOINTS, *overflowing)
    assert math.isnan(events(tmp_path / "run", "train")[0]["grad_norm"])
    assert replayed(tmp_path / "run", 1) == {"loss", "gradient"}
    on_another_processor(tmp_path / "run")
    assert replayed(tmp_path / "run", 1) == {"there", "here", "loss", "gradient"}


GOLDEN = "cc3b9963f96d8abbcc593c1abc663bf93f94ae2185699058fa586c34db783b3e"


def test_what_is_recorded_never_changes(proven_run: Path) -> None:
    """Or the records of older runs are worth nothing. The recipe's digest is left out: it has the shards' checksums,
    which depend on the JPEG library."""
    sums = [parsed(event["record"]) for event in events(proven_run, "start") + events(proven_run, "train")]
    assert written(sums[7][0] - sums[0][0], sums[7][1]) == GOLDEN


def test_other_libraries_are_named(proven_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They accuse nobody: only pixels depend on them, which are not compared."""
    run = tmp_path / "run"
    shutil.copytree(proven_run, run, symlinks=True)
    lines, here = (run / "metrics.jsonl").read_text(), f"Pillow {PIL.__version__}"
    (run / "metrics.jsonl").write_text(lines.replace(here, "Pillow 9.1, Pillow"))
    assert prove(run, dataset=None, all_draws=False)
    assert f"machine  the run had Pillow 9.1 (here {PIL.__version__}): pixels" in capsys.readouterr().out
    assert compare_machines(ReportedRun(run), ReportedRun(proven_run)) == f"Pillow 9.1, Pillow | {here}"


def test_draws_of_another_version_are_not_judged(
    proven_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of a dali_train that did not record the version, nor keep a checkpoint that has it in its recipe."""
    run = tmp_path / "run"
    shutil.copytree(proven_run, run, symlinks=True)
    shutil.rmtree(run / "checkpoints")
    environment = json.loads((run / "environment.json").read_text())
    assert environment.pop("draws") == DRAWS_VERSION
    (run / "environment.json").write_text(json.dumps(environment))
    for judge in (partial(prove, run, dataset=None, all_draws=False), partial(Recorded.of, RunDirectory(run), 2)):
        with pytest.raises(ConfigError, match=r"has version 1 of the draws, .* 2: use the dali_train that trained it"):
            judge()
    assert diff(run, proven_run, steps=1) is False
    assert "  version of the draws: 1 | 2\n" in capsys.readouterr().out


def test_diff_compares_records(proven_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(proven_run, run, symlinks=True)
    one, other = ReportedRun(proven_run), ReportedRun(run)
    assert compare_records(one, other) == ""
    exchange_a_sample(run)
    assert "order of steps 4 to 4" in compare_records(one, ReportedRun(run))
