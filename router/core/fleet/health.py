"""Health of a cell's replicas: slow, lying and failing ones are ejected, and tried again.

A replica is ejected as *slow* when the 99th percentile of its recent steps is more than three times
the median of its peers', each step measured against what steps of its size usually take in this
cell; as *lying* when its canaries accuse it, by the rules of the detector (`sluice.detector`); as
*failing* after engine failures in a row. After a back-off that doubles it is probed, gets a trial
share of the work, and is healthy again after good answers. A lost replica that comes back begins
with the trial; one that is lost again and again waits like the rest.

At most a third of the attached replicas is ejected at a time. When many seem ill, the measure or
the load is at fault, and a pool that serves badly is better than one that does not serve.
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

PROBE_INTERVAL_S = 5.0  # of a healthy replica; each costs it sixteen short decode rows
PROBE_TIMEOUT_S = 6.0  # the shell's own deadline is 5 s; after this a probe is given up unheard
TRIAL_ACTIVE = 4  # sequences that a half-open replica holds at most
TRIAL_GOOD = 3  # answers, of requests or probes, that end the trial
BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 60.0
FORGIVE_S = 60.0  # healthy for this long: the back-off begins anew

_FIRST_PROBE_S = 0.25  # after the attachment, so that a pool's first answers come together
_TRIAL_PROBE_S = 0.2
_FAILURES_MAX = 3  # incidents in a row
_PROBES_MISSED_MAX = 2  # in a row
_PROBE_PAUSE_S = 0.1  # so that the next answer comes from another batch

_NEVER = float("inf")
_RELEASE_ORDER = {SLOW: 0, LOST: 1, FAILING: 2, LYING: 3}  # order of return in a panic


class HealthState(IntEnum):
    """Whether a replica may take work."""

    HEALTHY = 0
    EJECTED = 1
    HALF_OPEN = 2  # a trial share


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """A change of state.

    Attributes:
        replica_id: Id of the replica.
        state: New state of the replica.
        reason: SLOW, LYING, FAILING, LOST, or empty when it is healthy.
        wrong: Wrongly answered canaries, of the counted ones.
        asked: Counted canaries.
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
        # Not all of a pool at the same moment.
        self.interval_s = PROBE_INTERVAL_S * (0.8 + 0.4 * (crc32(name.encode()) % 1024) / 1024)
        self.is_attached = False
        self.state = HealthState.HEALTHY
        self.reason = ""
        self.since = 0.0  # of the state
        self.strikes = 0  # ejections and losses that are not forgiven yet
        self.good = 0  # of the trial
        self.steps = Steps()
        self.clear()

    def clear(self) -> None:
        """Drop the observations of an attachment, or those before an ejection."""
        self.answer: Text | None = None
        self.is_new_answer = False
        self.record = CLEAN
        self.failures = self.missed = 0
        self.failed_at = -_NEVER
        self.steps.clear()
        self.probe_at = _NEVER
        self.probed_at: float | None = None  # a probe is on its way

    def starts_probe(self, now: float) -> bool:
        """Return whether a probe is due and none is under way; then it starts now."""
        if self.probed_at is not None and now >= self.probed_at + PROBE_TIMEOUT_S:
            self.probed_at = None
        if self.probed_at is not None or now < self.probe_at:
            return False
        self.probed_at = now
        self.probe_at = now + self.interval_s
        return True


class CellHealth:
    """The health of one cell's replicas. Unknown replicas are ignored, and count as healthy.

    Call `tick` after every event; then `verdicts`. Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._steps = StepTimes()
        self._verdicts: list[HealthVerdict] = []
        self._due = _NEVER
        self._is_answer_new = False
        self._question = 0
        self._is_fewer = False  # attached replicas, since the last tick

    # --- what happens -----------------------------------------------------------------------

    def attached(self, replica_id: str, now: float) -> None:
        """Begin an attachment: on trial when an earlier one was lost a moment ago."""
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
        """End an attachment that broke or was silent; one that ended in order is forgotten."""
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
        """Drop a replica that left the cell; the next `tick` applies the effects on others."""
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
        """Note an engine's step: its time, and the work in it.

        Args:
            replica_id: Id of the replica.
            step_s: Seconds of the step.
            now: Monotonic seconds.
            prompt_tokens: Prompt tokens that the step computed.
            decodes: Sequences that got a token.
            kv_blocks: KV blocks in use.
        """
        replica = self._replicas.get(replica_id)
        if replica is None or replica.state is HealthState.EJECTED or step_s <= 0.0:
            return
        context = kv_blocks.bit_length() + 1 >> 1  # matters less than the rest: in steps of 4
        size = prompt_tokens.bit_length() << 16 | decodes.bit_length() << 8 | context
        if self._steps.add(replica.steps, size, step_s, now):
            self._due = min(self._due, self._steps.judged_at + JUDGE_S)

    def failed(self, replica_id: str, now: float) -> None:
        """Note that an engine failed a sequence; do not report "busy" here.

        A failed step ends all of its sequences: simultaneous failures are one incident.
        """
        replica = self._replicas.get(replica_id)
        if replica is None or not replica.is_attached or replica.failed_at == now:
            return
        replica.failed_at = now
        replica.failures += 1
        self._failed(replica, now)

    def succeeded(self, replica_id: str, now: float) -> None:
        """Note that an engine finished a request."""
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.is_attached:
            replica.failures = 0
            if replica.state is HealthState.HALF_OPEN:
                self._good(replica, now)

    def answered(self, replica_id: str, answer: CanaryAnswer, now: float) -> None:
        """Note the answer to a probe; those to an earlier question do not count any more."""
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
        """Note that a probe was not answered in time, or with an error that is not "busy"."""
        replica = self._probe_over(replica_id, now)
        if replica is not None:
            self._missed(replica, now)

    # --- what follows -----------------------------------------------------------------------

    def tick(self, now: float) -> list[str]:
        """Judge, and return the replicas to probe now: each has at most one probe under way."""
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
        """Return when `tick` is due even if nothing happens; infinity without replicas."""
        return max(now, self._due)

    def may_take(self, replica_id: str, active: int) -> bool:
        """Return whether a replica that holds `active` sequences may be sent one more."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return True
        if replica.state is HealthState.HALF_OPEN:
            return active < TRIAL_ACTIVE
        return replica.state is HealthState.HEALTHY

    def state(self, replica_id: str) -> HealthState:
        """Return the state of a replica; of one that is lost, EJECTED."""
        replica = self._replicas.get(replica_id)
        return HealthState.HEALTHY if replica is None else replica.state

    def reason(self, replica_id: str) -> str:
        """Return why a replica is not healthy: SLOW, LYING, FAILING, LOST; empty if it is."""
        replica = self._replicas.get(replica_id)
        return "" if replica is None else replica.reason

    def verdicts(self) -> list[HealthVerdict]:
        """Return the changes of state since the last call, in their order."""
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
        """Eject a replica, or double the back-off of an ejected one."""
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
        """Try the mildest cases early when others were lost: at most a third stays ejected."""
        self._is_fewer = False
        attached = [entry for entry in self._replicas.values() if entry.is_attached]
        ejected = [entry for entry in attached if entry.state is HealthState.EJECTED]
        ejected.sort(key=lambda entry: (_RELEASE_ORDER[entry.reason], entry.since, entry.name))
        for replica in ejected[: max(0, -room(len(attached), len(ejected)))]:
            self._try(replica, replica.reason, now)

    def _good(self, replica: _Replica, now: float) -> None:
        """Count a good answer of a trial; the last one ends it, unless it was slow throughout."""
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
        """Eject after failures in a row; one is enough in a trial."""
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
            return None  # of an older attachment, or given up
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
        """Return the right answer, None if it is unknown, and how answers are compared with it.

        `own` is the answer of an ejected replica, which counts in its own case only.
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
        """Put a replica that answers right on trial; a lying one only when the truth is known."""
        verdict = _verdict(answer, *self._truth(answer))
        is_unknown = verdict is AnswerVerdict.UNJUDGED
        if verdict is AnswerVerdict.RIGHT or (is_unknown and replica.reason != LYING):
            self._try(replica, replica.reason, now)
        else:
            self._eject(replica, replica.reason if is_unknown else LYING, now)

    def _doubt(self, replica: _Replica, now: float) -> None:
        """Ask again soon; after repeated doubts, eject."""
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
    """Count an ejection or a loss; those before a long healthy time are dropped."""
    if replica.state is HealthState.HEALTHY and now - replica.since >= FORGIVE_S:
        replica.strikes = 0
    replica.strikes += 1
