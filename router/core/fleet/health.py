"""Ejects slow, lying and failing replicas of a cell, and tries them again later.

A replica is ejected as *slow* by the 99th percentile of its recent step times. The limit is three
times the median of its peers' percentiles. Each step time is first divided by the usual time of
steps of that size in the cell. A replica is ejected as *lying* if its canary answers accuse it by
the rules of `sluice.detector`. It is ejected as *failing* after several engine failures in a row.

After a back-off, which doubles with each ejection, an ejected replica is probed. Then a few
requests are sent to the replica as a trial, and enough good answers end the trial. A replica that
was lost and attached again starts with the trial. After repeated losses the replica first waits for
the back-off.

At most a third of the attached replicas is ejected at the same time. If more replicas seem
unhealthy, the cause is probably the measurement or the load. Even then, a pool that serves badly is
better than a pool that does not serve.
"""

from dataclasses import dataclass
from enum import IntEnum
from zlib import crc32

from router.core.fleet.step_times import JUDGE_S, Steps, StepTimes
from router.core.types.canary import CanaryAnswer
from sluice.detector.consensus import RULES, Rules, Text, consensus, difference, fitted
from sluice.detector.evidence import AnswerVerdict, EvidenceKind
from sluice.detector.quota import room
from sluice.detector.record import CLEAN, Suspicion

SLOW, LYING, FAILING, LOST = "slow", "lying", "failing", "lost"

PROBE_INTERVAL_S = 5.0  # seconds between probes of a healthy replica, each of 16 output tokens
PROBE_TIMEOUT_S = 6.0  # seconds until a probe is abandoned, above the shell's own timeout of 5 s
TRIAL_ACTIVE = 4  # most sequences on a replica that is on trial
TRIAL_GOOD = 3  # good answers, to requests or probes, that end a trial
BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 60.0
FORGIVE_S = 60.0  # seconds of health after which the back-off starts again at the first value

_FIRST_PROBE_S = 0.25  # seconds to the first probe, so that replicas of a new pool answer together
_TRIAL_PROBE_S = 0.2  # seconds between probes of a replica on trial
_FAILURES_MAX = 3  # consecutive engine failures until an ejection
_PROBES_MISSED_MAX = 2  # consecutive unanswered probes until an ejection
_PROBE_PAUSE_S = 0.1  # seconds until a repeated probe, which then runs in another batch

_NEVER = float("inf")
_RELEASE_ORDER = {SLOW: 0, LOST: 1, FAILING: 2, LYING: 3}  # order of early trials in `_release`


class HealthState(IntEnum):
    """The health of a replica, which determines whether requests are sent to it."""

    HEALTHY = 0
    EJECTED = 1
    HALF_OPEN = 2  # on trial, with at most `TRIAL_ACTIVE` sequences


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """A change of a replica's health state.

    Attributes:
        replica_id: Id of the replica.
        state: New state of the replica.
        reason: SLOW, LYING, FAILING or LOST, or empty for a healthy replica.
        wrong: Number of wrongly answered canaries among `asked`.
        asked: Number of recent canaries on record.
    """

    replica_id: str
    state: HealthState
    reason: str
    wrong: int = 0
    asked: int = 0


class _Replica:
    """The health record of one replica."""

    __slots__ = (
        *("answer", "failed_at", "failures", "good", "interval_s", "is_attached"),
        *("is_new_answer", "missed", "name", "probe_at", "probed_at", "reason", "record"),
        *("since", "state", "steps", "strikes"),
    )

    def __init__(self, name: str) -> None:
        self.name = name
        # The interval differs between replicas, so that a pool is not probed all at once.
        self.interval_s = PROBE_INTERVAL_S * (0.8 + 0.4 * (crc32(name.encode()) % 1024) / 1024)
        self.is_attached = False
        self.state = HealthState.HEALTHY
        self.reason = ""
        self.since = 0.0  # time of the last change of state
        self.strikes = 0  # ejections and losses since the last long healthy period
        self.good = 0  # good answers of the present trial
        self.steps = Steps()
        self.clear()

    def clear(self) -> None:
        """Drop all observations, at the start of an attachment or at an ejection."""
        self.answer: Text | None = None
        self.is_new_answer = False
        self.record = CLEAN
        self.failures = self.missed = 0
        self.failed_at = -_NEVER
        self.steps.clear()
        self.probe_at = _NEVER
        self.probed_at: float | None = None  # start of the probe in progress

    def starts_probe(self, now: float) -> bool:
        """Start a probe if one is due and none is in progress, and return whether it started."""
        if self.probed_at is not None and now >= self.probed_at + PROBE_TIMEOUT_S:
            self.probed_at = None
        if self.probed_at is not None or now < self.probe_at:
            return False
        self.probed_at = now
        self.probe_at = now + self.interval_s
        return True


class CellHealth:
    """The health records of one cell's replicas, from which `verdicts` returns the changes.

    Events of unknown replicas are ignored. The state of an unknown replica is HEALTHY. The caller
    calls `tick` and then `verdicts` after every event. All times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._steps = StepTimes()
        self._verdicts: list[HealthVerdict] = []
        self._due = _NEVER
        self._is_answer_new = False
        self._question = 0
        self._is_fewer = False  # whether a replica was removed since the last tick

    # --- events -----------------------------------------------------------------------------

    def attached(self, replica_id: str, now: float) -> None:
        """Start an attachment.

        The replica is healthy at first. After recent losses it is on trial or ejected.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            replica = self._replicas[replica_id] = _Replica(replica_id)
        assert not replica.is_attached, "a replica has one attachment"
        replica.clear()
        replica.is_attached = True
        self._steps.join(replica.steps)
        replica.state, replica.reason = HealthState.HEALTHY, ""
        replica.since = now
        replica.probe_at = now + _FIRST_PROBE_S
        if replica.strikes > 1 and self._may_eject():
            self._eject(replica, LOST, now, is_new=False)
        elif replica.strikes:
            self._try(replica, LOST, now)
        self._due = min(self._due, replica.probe_at)

    def lost(self, replica_id: str, now: float) -> None:
        """Record that an attachment was lost. An orderly end calls `forget` instead."""
        replica = self._replicas.get(replica_id)
        if replica is None or not replica.is_attached:
            return
        _strike(replica, now)
        replica.clear()
        replica.is_attached = False
        self._steps.leave(replica.steps)
        replica.state, replica.reason, replica.since = HealthState.EJECTED, LOST, now
        self._release(now)

    def forget(self, replica_id: str) -> None:
        """Delete the record of a replica that left the cell. Then `tick` may start early trials."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._steps.leave(replica.steps)
            self._verdicts = [entry for entry in self._verdicts if entry.replica_id != replica_id]
            self._is_fewer = True
            self._due = -_NEVER

    def stepped(
        self,
        replica_id: str,
        step_s: float,
        now: float,
        *,
        prompt_tokens: int = 0,
        decodes: int = 0,
        kv_blocks: int = 0,
    ) -> None:
        """Record the duration and the work of an engine's step.

        Args:
            replica_id: Id of the replica.
            step_s: Duration of the step, in seconds.
            now: Time, in monotonic seconds.
            prompt_tokens: Prompt tokens that the step computed.
            decodes: Number of decoding sequences in the step.
            kv_blocks: KV blocks in use.
        """
        replica = self._replicas.get(replica_id)
        if replica is None or replica.state is HealthState.EJECTED or step_s <= 0.0:
            return
        context = kv_blocks.bit_length() + 1 >> 1  # its influence is small, so classes are wide
        size = prompt_tokens.bit_length() << 16 | decodes.bit_length() << 8 | context
        if self._steps.add(replica.steps, size, step_s, now):
            self._due = min(self._due, self._steps.judged_at + JUDGE_S)

    def failed(self, replica_id: str, now: float) -> None:
        """Record that an engine failed a sequence. A "busy" reply is not a failure.

        Failures at the same time are recorded as one incident, because a failed step ends all
        sequences in it.
        """
        replica = self._replicas.get(replica_id)
        if replica is None or not replica.is_attached or replica.failed_at == now:
            return
        replica.failed_at = now
        replica.failures += 1
        self._failed(replica, now)

    def succeeded(self, replica_id: str, now: float) -> None:
        """Record that an engine finished a request."""
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.is_attached:
            replica.failures = 0
            if replica.state is HealthState.HALF_OPEN:
                self._good(replica, now)

    def answered(self, replica_id: str, answer: CanaryAnswer, now: float) -> None:
        """Record the answer to a probe, unless the canary prompt has changed since the probe."""
        replica = self._probe_over(replica_id, now)
        if replica is None:
            return
        replica.missed = 0
        if not answer.text.token_ids:
            self._missed(replica, now)
            return
        if answer.question != self._question:
            self._question = answer.question
            for other in self._replicas.values():
                other.answer, other.is_new_answer = None, False
        replica.answer = answer.text
        replica.is_new_answer = self._is_answer_new = True
        self._due = now

    def probe_failed(self, replica_id: str, now: float) -> None:
        """Record that a probe timed out, or failed with an error other than "busy"."""
        replica = self._probe_over(replica_id, now)
        if replica is not None:
            self._missed(replica, now)

    # --- judgement --------------------------------------------------------------------------

    def tick(self, now: float) -> list[str]:
        """Judge new observations, and return the replicas to probe now.

        A replica has at most one probe in progress.
        """
        if now < self._due:
            return []
        if self._is_fewer:
            self._release(now)
        if self._is_answer_new:
            self._judge_answers(now)
        steps = self._steps
        if steps.has_suspects and now - steps.judged_at >= JUDGE_S:
            self._judge_steps(now)
        probes: list[str] = []
        due = steps.judged_at + JUDGE_S if steps.has_suspects else _NEVER
        for replica in self._replicas.values():
            if replica.is_attached:
                if replica.starts_probe(now):
                    probes.append(replica.name)
                waits_for = replica.probed_at
                due = min(
                    due, replica.probe_at if waits_for is None else waits_for + PROBE_TIMEOUT_S
                )
        self._due = due
        return probes

    def next_at(self, now: float) -> float:
        """Return the time at which `tick` is due without an event, or infinity without replicas."""
        return max(now, self._due)

    def may_take(self, replica_id: str, active: int) -> bool:
        """Return whether a replica with `active` sequences may be sent another sequence."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return True
        if replica.state is HealthState.HALF_OPEN:
            return active < TRIAL_ACTIVE
        return replica.state is HealthState.HEALTHY

    def state(self, replica_id: str) -> HealthState:
        """Return the state of a replica, which is EJECTED for a lost replica."""
        replica = self._replicas.get(replica_id)
        return HealthState.HEALTHY if replica is None else replica.state

    def reason(self, replica_id: str) -> str:
        """Return SLOW, LYING, FAILING or LOST for an unhealthy replica, or an empty string."""
        replica = self._replicas.get(replica_id)
        return "" if replica is None else replica.reason

    def verdicts(self) -> list[HealthVerdict]:
        """Return the changes of state since the last call, in order."""
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def _judge_steps(self, now: float) -> None:
        slow = self._steps.slow(now)
        for replica in self._replicas.values():
            if replica.steps in slow and self._may_eject():
                self._eject(replica, SLOW, now)

    # --- states -----------------------------------------------------------------------------

    def _may_eject(self) -> bool:
        attached = [entry for entry in self._replicas.values() if entry.is_attached]
        ejected = sum(entry.state is HealthState.EJECTED for entry in attached)
        return room(len(attached), ejected) > 0

    def _eject(self, replica: _Replica, reason: str, now: float, *, is_new: bool = True) -> None:
        """Eject a replica, or double the back-off of a replica that is already ejected."""
        if is_new:
            _strike(replica, now)
        if replica.state is not HealthState.EJECTED or replica.reason != reason:
            canaries = replica.record.recent.get(EvidenceKind.CANARY, ())
            counts = canaries.count(AnswerVerdict.WRONG), len(canaries)
            self._verdicts.append(HealthVerdict(replica.name, HealthState.EJECTED, reason, *counts))
        probed_at, record = replica.probed_at, replica.record
        replica.clear()
        replica.probed_at, replica.record = probed_at, record
        replica.state, replica.reason, replica.since = HealthState.EJECTED, reason, now
        exponent = min(replica.strikes - 1 if is_new else replica.strikes - 2, 16)
        replica.probe_at = now + min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0**exponent)
        self._due = min(self._due, replica.probe_at)

    def _try(self, replica: _Replica, reason: str, now: float) -> None:
        replica.state, replica.reason, replica.since = HealthState.HALF_OPEN, reason, now
        replica.good = replica.failures = replica.missed = 0
        replica.record = CLEAN
        replica.probe_at = now + _TRIAL_PROBE_S
        self._due = min(self._due, replica.probe_at)
        self._verdicts.append(HealthVerdict(replica.name, HealthState.HALF_OPEN, reason))

    def _release(self, now: float) -> None:
        """Start early trials after a loss of replicas, so that at most a third stays ejected.

        Replicas that were ejected for the least serious reasons are released first.
        """
        self._is_fewer = False
        attached = [entry for entry in self._replicas.values() if entry.is_attached]
        ejected = [entry for entry in attached if entry.state is HealthState.EJECTED]
        ejected.sort(key=lambda entry: (_RELEASE_ORDER[entry.reason], entry.since, entry.name))
        for replica in ejected[: max(0, -room(len(attached), len(ejected)))]:
            self._try(replica, replica.reason, now)

    def _good(self, replica: _Replica, now: float) -> None:
        """Record a good answer of a trial, and end the trial after `TRIAL_GOOD` of them.

        The replica is then healthy, or is ejected again if most steps of the trial were slow.
        """
        replica.good += 1
        if replica.good < TRIAL_GOOD:
            return
        if replica.steps.is_slow_in_short() and self._may_eject():
            self._eject(replica, SLOW, now)
            return
        replica.state, replica.reason, replica.since = HealthState.HEALTHY, "", now
        replica.probe_at = now + replica.interval_s
        self._due = min(self._due, replica.probe_at)
        self._verdicts.append(HealthVerdict(replica.name, HealthState.HEALTHY, ""))

    def _failed(self, replica: _Replica, now: float) -> None:
        """Eject a replica after several consecutive failures, or after one during a trial."""
        is_trial = replica.state is HealthState.HALF_OPEN
        too_many = replica.failures >= _FAILURES_MAX or replica.missed >= _PROBES_MISSED_MAX
        if replica.state is HealthState.EJECTED or not (is_trial or too_many):
            return
        if self._may_eject():
            self._eject(replica, FAILING, now)
        elif is_trial:
            replica.good = 0

    # --- probes -----------------------------------------------------------------------------

    def _probe_over(self, replica_id: str, now: float) -> _Replica | None:
        replica = self._replicas.get(replica_id)
        if replica is None or not replica.is_attached or replica.probed_at is None:
            return None  # the probe belongs to an earlier attachment, or was abandoned
        replica.probed_at = None
        if replica.state is HealthState.HALF_OPEN:
            replica.probe_at = min(replica.probe_at, now + _TRIAL_PROBE_S)
        self._due = min(self._due, replica.probe_at)
        return replica

    def _missed(self, replica: _Replica, now: float) -> None:
        replica.answer = None
        replica.missed += 1
        if replica.state is HealthState.EJECTED:
            self._eject(replica, replica.reason, now)
        else:
            self._failed(replica, now)

    def _truth(self, own: Text | None = None) -> tuple[Text | None, Rules]:
        """Return the right answer, or None if unknown, and the rules for comparisons with it.

        Healthy replicas vote on the right answer. `own` is the additional vote of an ejected
        replica whose own answer is judged.
        """
        voters = [
            replica.answer
            for replica in self._replicas.values()
            if replica.answer is not None and replica.state is not HealthState.EJECTED
        ]
        if own is not None:
            voters.append(own)
        truth = consensus(voters)
        if truth is None or not truth.logprobs:
            return truth, RULES
        return truth, fitted(truth, ([it] for it in voters))

    def _judge_answers(self, now: float) -> None:
        self._is_answer_new = False
        truth, rules = self._truth()
        for replica in self._replicas.values():
            answer, is_new = replica.answer, replica.is_new_answer
            replica.is_new_answer = False
            is_trusted = replica.record.suspicion is Suspicion.TRUSTED
            if answer is None or not (is_new or is_trusted):
                continue
            if replica.state is HealthState.EJECTED:
                if is_new:
                    self._judge_ejected(replica, answer, now)
                continue
            verdict = _verdict(answer, truth, rules)
            if is_new or verdict is AnswerVerdict.WRONG:
                replica.record = replica.record.with_answer(EvidenceKind.CANARY, verdict)
            if verdict is AnswerVerdict.WRONG:
                self._doubt(replica, now)
            elif is_new and replica.state is HealthState.HALF_OPEN:
                self._good(replica, now)

    def _judge_ejected(self, replica: _Replica, answer: Text, now: float) -> None:
        """Start the trial of an ejected replica whose answer is right, or eject the replica again.

        If the right answer is unknown, the trial starts unless the replica was ejected as lying.
        """
        verdict = _verdict(answer, *self._truth(answer))
        is_unknown = verdict is AnswerVerdict.UNJUDGED
        if verdict is AnswerVerdict.RIGHT or (is_unknown and replica.reason != LYING):
            self._try(replica, replica.reason, now)
        else:
            self._eject(replica, replica.reason if is_unknown else LYING, now)

    def _doubt(self, replica: _Replica, now: float) -> None:
        """Probe a replica again soon after a wrong answer, or eject the replica once accused."""
        replica.good = 0
        if replica.record.suspicion < Suspicion.ACCUSED:
            replica.probe_at = now + _PROBE_PAUSE_S
            self._due = min(self._due, replica.probe_at)
        elif self._may_eject():
            self._eject(replica, LYING, now)


def _verdict(answer: Text, truth: Text | None, rules: Rules) -> AnswerVerdict:
    if truth is None:
        return AnswerVerdict.UNJUDGED
    is_right = answer == truth or difference(answer, truth, rules) is None
    return AnswerVerdict.RIGHT if is_right else AnswerVerdict.WRONG


def _strike(replica: _Replica, now: float) -> None:
    """Count an ejection or a loss. After a long healthy period the count starts again."""
    if replica.state is HealthState.HEALTHY and now - replica.since >= FORGIVE_S:
        replica.strikes = 0
    replica.strikes += 1
