"""Answers: the recursion without gradients, for each puzzle until its answer stands."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from macbook_optimization.errors import ConfigError
from trm.backends.base import Answers
from trm.backends.pytorch.lanes import Lanes
from trm.backends.pytorch.losses import beliefs
from trm.backends.pytorch.memory import allocations
from trm.backends.pytorch.model import TinyRecursiveModel, load_weights
from trm.config import EvaluationConfig, ModelConfig, TrainingConfig
from trm.tasks.base import IntArray, TaskShape

BoolArray = NDArray[np.bool_]

_CERTAIN = 1e-9  # a weight below comes of rounding, or of what the model is sure is wrong


class TorchAnswerer:
    def __init__(self, model: TinyRecursiveModel, training: TrainingConfig, lanes: Lanes) -> None:
        self.model, self.lanes, self.loss = model, lanes, training.loss
        # Terminal supervision may stop after any recursion.
        self.cycles = 1 if training.supervision == "terminal" else model.config.cycles_per_step

    def answer(
        self,
        inputs: IntArray,
        puzzle_identifiers: IntArray,
        thinking: EvaluationConfig,
    ) -> Answers:
        shape = self.model.shape
        if thinking.guesses and shape.output_vocab_size != shape.vocab_size:
            raise ConfigError("Guesses are for tasks whose answers have the same tokens as their questions.")
        pieces: list[Answers] = []

        def think(cut: slice) -> Answers:
            questions, identifiers = inputs[cut], puzzle_identifiers[cut]
            answers, left = self._answer(questions, identifiers, thinking)
            doubts = answers.halt_logits[-1] < 0
            if thinking.settle or thinking.halt:
                doubts |= ~left
            doubted = np.flatnonzero(doubts)
            kept = (answers.tokens[-1] == questions)[doubted]
            for attempt in range(1, thinking.tries if len(doubted) else 1):
                luck = torch.Generator().manual_seed(attempt)
                others, _ = self._answer(questions[doubted], identifiers[doubted], thinking, luck, kept)
                answers.reconsider(doubted, others)
            return answers

        with allocations(torn=False):
            if len(inputs) < self.lanes.count:  # then all cores work on the same products
                return think(slice(None))
            self.lanes.each(len(inputs), lambda done: len(inputs), think, pieces.append)
        return Answers(
            np.concatenate([piece.tokens for piece in pieces], axis=1),
            np.concatenate([piece.halt_logits for piece in pieces], axis=1),
            np.concatenate([piece.steps for piece in pieces]),
        )

    @torch.no_grad()
    def _answer(
        self,
        inputs: IntArray,
        puzzle_identifiers: IntArray,
        thinking: EvaluationConfig,
        luck: torch.Generator | None = None,
        kept: BoolArray | None = None,
    ) -> tuple[Answers, BoolArray]:
        """And which puzzles left. Without `luck`, neither noise nor guesses; it is the same for every puzzle,
        so that no batch changes an answer. What the first try `kept` of a question, guesses must keep."""
        depth = thinking.depth
        attempt = _Try(torch.from_numpy(inputs), thinking, self.loss, luck, kept)
        rows = None
        if self.model.config.puzzle_emb_ndim:
            rows = self.model.puzzle_emb.weights[torch.from_numpy(puzzle_identifiers)]
        tokens = np.zeros((depth, *inputs.shape), dtype=np.int32)
        halt_logits = np.zeros((depth, len(inputs)), dtype=np.float32)
        steps = np.zeros(len(inputs), dtype=np.int64)
        active = torch.arange(len(inputs))
        latents = self.model.start(len(inputs))
        if luck is not None and thinking.noise:
            latents = latents + thinking.noise * self.model.noise(luck)
        for step in range(depth):
            latents = self.model(
                attempt.asked[active], None if rows is None else rows[active], latents, self.cycles
            )
            here = active.numpy()
            if step:
                tokens[step], halt_logits[step] = tokens[step - 1], halt_logits[step - 1]
            logits = self.model.token_logits(self.model.answer_positions(latents[0]))
            tokens[step, here] = logits.argmax(-1)
            halt_logits[step, here] = self.model.halt_logits(latents[0])[:, 0]
            steps[here] += 1
            if step:
                attempt.see(here, (tokens[step, here] == tokens[step - 1, here]).all(-1))
            believed = attempt.keeps(here, tokens[step, here]) & (halt_logits[step, here] >= 0)
            done = attempt.done(here, step + 1, believed, logits)
            if done.any():
                going_on = torch.from_numpy(~done)
                active, latents = active[going_on], latents[:, :, going_on]
                if not len(active):
                    tokens[step + 1 :], halt_logits[step + 1 :] = tokens[step], halt_logits[step]
                    break
        left = np.ones(len(inputs), dtype=bool)
        left[active.numpy()] = False
        if attempt.guesses:
            halt_logits[:, ~left] = -np.inf  # a try that has no answer
        return Answers(tokens, halt_logits, steps), left


class _Try:
    """What is asked, guesses included, and when a puzzle is done."""

    def __init__(
        self,
        questions_BL: Tensor,
        thinking: EvaluationConfig,
        loss: str,
        luck: torch.Generator | None,
        kept: BoolArray | None,
    ) -> None:
        self.thinking, self.loss, self.luck, self.kept = thinking, loss, luck, kept
        self.guesses = 0 if luck is None else thinking.guesses
        self.questions = questions_BL
        self.asked = questions_BL.clone() if self.guesses else questions_BL
        self.guessed = np.zeros(len(questions_BL), dtype=bool)
        self.unchanged = np.zeros(len(questions_BL), dtype=np.int64)

    def see(self, puzzles: IntArray, same: BoolArray) -> None:
        self.unchanged[puzzles] = np.where(same, self.unchanged[puzzles] + 1, 0)

    def keeps(self, puzzles: IntArray, answers: NDArray[np.int32]) -> BoolArray:
        if self.kept is None or not self.guesses:
            return np.ones(len(puzzles), dtype=bool)
        broken: BoolArray = ((answers != self.questions[puzzles].numpy()) & self.kept[puzzles]).any(-1)
        return ~broken

    def done(self, puzzles: IntArray, step: int, believed: BoolArray, logits_BLV: Tensor) -> BoolArray:
        """Which of these puzzles leave after this step, counted from 1."""
        thinking, unchanged = self.thinking, self.unchanged[puzzles]
        if not self.guesses:
            settled = unchanged >= (thinking.settle or thinking.depth)
            return settled | believed if thinking.halt else settled
        guessed = self.guessed[puzzles]
        stands = believed & (unchanged >= thinking.standing)
        self._take_back(puzzles[stands & guessed])
        if step in thinking.guess_moments:
            chances = torch.empty(logits_BLV.shape[1:]).exponential_(generator=self.luck)
            doubted = ~believed | (guessed & ~stands)
            self._guess(puzzles[doubted], beliefs(logits_BLV[doubted], self.loss), chances)
        return stands & ~guessed

    def _take_back(self, puzzles: IntArray) -> None:
        self.asked[puzzles] = self.questions[puzzles]
        self.guessed[puzzles] = False
        self.unchanged[puzzles] = 0

    def _guess(self, puzzles: IntArray, beliefs_BLV: Tensor, chances_LV: Tensor) -> None:
        self.asked[puzzles] = with_a_guess(self.asked[puzzles], beliefs_BLV, chances_LV)
        self.guessed[puzzles] = True


def with_a_guess(questions_BL: Tensor, beliefs_BLV: Tensor, chances_LV: Tensor) -> Tensor:
    """One belief more in each, drawn with the weight p^2 (1 - p): a likely one, but none that is certain, for
    that would help nobody. The chances, drawn from an exponential distribution, are the same for all."""
    weights = (beliefs_BLV.square() * (1 - beliefs_BLV)).scatter(-1, questions_BL[..., None], 0)
    race = torch.where(weights < _CERTAIN, 0, weights / chances_LV).flatten(1)
    chosen = race.argmax(1, keepdim=True)
    position, token = chosen // weights.shape[-1], chosen % weights.shape[-1]
    nothing = race.gather(1, chosen) == 0
    return questions_BL.scatter(1, position, torch.where(nothing, questions_BL.gather(1, position), token))


def answerer(
    model: ModelConfig,
    training: TrainingConfig,
    shape: TaskShape,
    weights: Mapping[str, Tensor],
    lanes: int = 1,
) -> TorchAnswerer:
    network = TinyRecursiveModel(model, shape)
    load_weights(network, weights)
    return TorchAnswerer(network.requires_grad_(False), training, Lanes(lanes))
