"""One launch is no "1 launches": wherever text is made, ``things_in_words`` or a condition counts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
THINGS = re.compile(
    r" (layers|heads|launches|samples|steps|ranks|GPUs|rounds|trials|studies|hosts|nodes|files|cores|processes|tokens"
    r"|workers|devices|slots|places|copies)\b(?!/[sJ])"
)
MORE_THAN_ONE = {
    "optuna_dsat/script/batch_rule.py: {most} samples",
    "optuna_dsat/config/space_builder.py: {held_samples} samples",
    "optuna_dsat/integrations/deepspeed_trial/context.py: {model.dp_world_size} copies",
    "optuna_dsat/script/command/launcher_options.py: {', '.join(map(str, counts))} slots",
    "optuna_dsat/tuning/options/autotuning.py: {section.num_nodes} nodes",
    "optuna_dsat/guided/prior_knowledge.py: {len(self.launches)} launches",
    "optuna_dsat/integrations/deepspeed_trial/context.py: {self.distributed.size} ranks",
    "optuna_dsat/integrations/deepspeed_trial/ranks.py: {engine.dp_world_size} copies",
    "optuna_dsat/integrations/deepspeed_trial/ranks.py: {distributed.size} ranks",
    "optuna_dsat/plan/hugging_face.py: {longest} tokens",
    "optuna_dsat/plan/transformer.py: {self.heads} heads",
    "optuna_dsat/config/space_builder.py: {world} ranks",
    "optuna_dsat/study/spec.py: {ranks} ranks",
    "optuna_dsat/study/spec.py: {self.slots_per_trial} ranks",
    "optuna_dsat/guided/joint_estimate.py: {count} trials",
    "optuna_dsat/launch/places/cluster.py: {self._losses} places",
}
"""Where the number is never 1, by file and what stands there."""


def counted_without_care(path: Path) -> Iterator[str]:
    """Yield what a module writes as a number and a plural, outside of conditions."""

    def visit(node: ast.AST, *, asked: bool) -> Iterator[str]:
        if isinstance(node, ast.JoinedStr) and not asked:
            for number, text in zip(node.values, node.values[1:], strict=False):
                if not isinstance(number, ast.FormattedValue) or not isinstance(text, ast.Constant):
                    continue
                if result := THINGS.match(str(text.value)):
                    yield f"{path.relative_to(ROOT)}: {{{ast.unparse(number.value)}}}{result[0]}"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, asked=asked or isinstance(node, ast.IfExp))

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), asked=False)


def test_one_of_a_thing_is_no_plural() -> None:
    result = {
        item
        for folder in ("optuna_dsat", "pruners", "samplers")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_symlink()
        for item in counted_without_care(path)
    }
    assert result == MORE_THAN_ONE


@pytest.mark.parametrize(("code", "found"), [("f'{n} ranks'", 1), ("'a rank' if n == 1 else f'{n} ranks'", 0)])
def test_conditions_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, found: int) -> None:
    monkeypatch.setattr("tests.test_plurals.ROOT", tmp_path)
    (tmp_path / "module.py").write_text(code, encoding="utf-8")
    assert len(list(counted_without_care(tmp_path / "module.py"))) == found
