"StepLogger's times, speed and memory: every second to its part, and no waiting for a device"
import pytest
from reference import *
from test_steps import BASE
from fastaccum.logs.steps import DeviceSeconds, StepClock, StepLogger, StepTable, check_events

torch.manual_seed(0)
data = Data(torch.randn(61, 6), torch.randn(61, 4))

def rows(learn): return learn.step_logger.to_df()
def close(a, b, tol=1e-6): np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=tol, atol=tol)

def test_clipped_norm():
    "As the optimizer saw it, which is the same where nothing was clipped"
    seen = []
    learn = learner(data, 8, GradientAccumulation(20), GradientClip(.3), StepLogger(grad_norm=True, clipped_norm=True),
                    On('before_step', lambda l: seen.append(grads(l.model).norm()), order=50))
    learn.fit(2, .1)
    df = rows(learn)
    close(df.clipped_norm, seen); close(df.clipped_norm, df.grad_norm.clip(upper=.3), 1e-4)
    assert (df.grad_norm > .3).any()

class Clock:
    "A clock that a test moves"
    def __init__(self): self.t = 0.
    def __call__(self): return self.t
    def tick(self, s): return lambda *_: setattr(self, 't', self.t+s)

@pytest.mark.parametrize('micro,accum', [(None, 16), (4, 16), (None, 8)])
def test_times(monkeypatch, micro, accum):
    "Every second goes to its part, also when micro-batches are parts of loader batches"
    clock = Clock(); monkeypatch.setattr('fastaccum.logs.steps.perf_counter', clock)
    ticks = [On(ev, clock.tick(s), order=o)
             for ev,s,o in (('before_batch', 1, 10), ('after_pred', 10, 10), ('before_backward', 100, 11),
                            ('before_step', 1000, 20))]
    learn = learner(data, 8, GradientAccumulation(accum, micro_batch_size=micro), StepLogger(times=True, speed=True))
    learn.add_cbs(ticks)
    learn.fit(2)
    df = rows(learn)
    n_batches = [-(-n//8) for n in df['items']]
    n_micro = n_batches if micro is None else [-(-n//4) for n in df['items']]
    assert (df.data_s.tolist()==n_batches and df.forward_s.tolist()==[10*m for m in n_micro]
            and df.backward_s.tolist()==[100*m for m in n_micro] and set(df.step_s)=={1000})
    close(df.items_per_s, df['items']/(df.data_s+df.forward_s+df.backward_s+df.step_s))

def test_later_callbacks_see_the_same():
    "What the row has, and however often they ask: `WandbCallback` comes after StepLogger"
    seen = []
    learn = learner(data, 8, GradientAccumulation(20), StepLogger(times=True, speed=True))
    learn.add_cb(On('after_batch', lambda l: seen.extend(l.step_logger.step_values for _ in range(2))
                    if l.one_batch.closed else None, order=60))
    learn.fit(1)
    df = rows(learn)
    for k in ('data_s', 'forward_s', 'items_per_s'): assert [v[k] for v in seen[::2]]==[v[k] for v in seen[1::2]]==df[k].tolist()

class FakeEvent:
    "An event of a device that is behind: it knows its time only after `synchronize`, and says when it is asked too early"
    now,done,waits = 0,0,0
    def __init__(self, device, enable_timing): assert enable_timing
    def record(self): FakeEvent.now += 1; self.t = FakeEvent.now
    def query(self): return self.t <= FakeEvent.done
    def synchronize(self):
        FakeEvent.waits += self.t > FakeEvent.done
        FakeEvent.done = max(FakeEvent.done, self.t)
    def elapsed_time(self, other):
        assert other.t <= FakeEvent.done, 'asked too early'
        return (other.t-self.t)*1000.

def test_times_of_a_device(monkeypatch):
    "The host never waits for events while it trains, and reads those that are through"
    monkeypatch.setattr(torch, 'Event', FakeEvent)
    def device(self): self.device = torch.device('cuda')
    monkeypatch.setattr(StepClock, 'check', device)
    for lag in (None, 20):
        FakeEvent.now = FakeEvent.done = FakeEvent.waits = 0
        learn = learner(data, 8, GradientAccumulation(16), StepLogger(times=True))
        if lag: learn.add_cb(On('after_batch', lambda l: setattr(FakeEvent, 'done', max(0, FakeEvent.now-lag)), order=5))
        learn.fit(4)
        log = learn.step_logger
        assert (FakeEvent.waits==0 and len(log.rows.late)==(3*16 if lag is None else len(log.rows.late))
                and (lag is None or len(log.rows.late) < 20))
        df = rows(learn)
        assert df.forward_s.tolist()==[2.]*len(df)==df.backward_s.tolist() and df.step_s.tolist()==[1.]*len(df) and not log.rows.late

def test_nothing_is_measured_unasked():
    "No column and no event more than before"
    learn = learner(data, 8, GradientAccumulation(16), StepLogger())
    learn.fit(1)
    assert (list(rows(learn))==BASE
            and not any(cb is learn.step_logger
                        for ev in ('before_batch', 'before_backward', 'after_backward', 'after_step')
                        for cb,*_ in learn.one_batch.table[ev]))

def test_memory_needs_a_device_that_counts():
    learn = learner(data, 8, StepLogger(memory=True))
    with pytest.raises(ValueError, match="'cpu'.*PeakMemory"): learn.fit(1)

def test_times_need_a_device_that_can():
    "An error before training, where it has no events"
    def no_events(device, enable_timing): raise RuntimeError('Backend does not support events')
    with pytest.MonkeyPatch.context() as m:
        m.setattr(torch, 'Event', no_events)
        with pytest.raises(ValueError, match="'meta' device cannot measure time"): check_events(torch.device('meta'))

def test_peaks(monkeypatch):
    "Of each step: the record begins anew with every row"
    from types import SimpleNamespace as NS
    peak = NS(now=0)
    fake = NS(reset_peak_memory_stats=lambda d: setattr(peak, 'now', 0), max_memory_allocated=lambda d: peak.now*2**20)
    monkeypatch.setattr('fastaccum.logs.steps.backend', lambda d: fake)
    learn = learner(data, 8, GradientAccumulation(16), StepLogger(memory=True),
                    On('after_pred', lambda l: setattr(peak, 'now', max(peak.now, 10+l.iter))))
    learn.fit(1)
    assert rows(learn).peak_mb.tolist()==[11, 13, 15, 17]

def test_plot_times():
    learn = learner(data, 8, GradientAccumulation(16), StepLogger())
    learn.fit(1)
    with pytest.raises(ValueError, match='times=True'): learn.step_logger.plot_times()
    log = StepLogger(times=True)
    for part,word in (('data', 'num_workers'), ('forward', 'mixed precision'), ('step', 'accum_bs')):
        log.rows = StepTable()
        for i in range(3):
            log.rows.append(
                dict(step=i+1, items=8,
                     **{f'{k}_s': .9 if k==part else .05 for k in ('data', 'forward', 'backward', 'step')}))
        assert word in log.plot_times().get_title()

def test_resumed_rows_with_times():
    log = StepLogger(times=True)
    log.rows.append(dict(step=1, forward_s=DeviceSeconds([(e1 := _recorded(1), _recorded(3))])))
    again = StepLogger(times=True)
    again.rows.load_state_dict(log.rows.state_dict())
    assert again.rows['forward_s'].tolist()==[2.]
def _recorded(t):
    e = FakeEvent('cuda', True); e.t = t
    return e
