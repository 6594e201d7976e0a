"The table of who listens, without a fit: what stands in it, who is called, and what happens when somebody raises"
from types import SimpleNamespace
import pytest
from fastai.basics import Callback, CancelBackwardException, CancelBatchException, CancelFitException, CancelStepException, L, Recorder, \
    noop, store_attr
from fastai.callback.mixup import MixHandler
from fastai.callback.schedule import LRFinder
from fastaccum.loop.batch_loop import BatchLoop
from fastaccum.loop.events import EventTable, _may_read_pred, declares, is_a, is_known, with_context

class Hears(Callback):
    "Writes down which of its methods were called"
    def __init__(self, log=None, who='', order=0, **kwargs):
        store_attr('log,who,order')
        for k,v in kwargs.items(): setattr(self, k, v)
    def hear(self, event): self.log.append(f'{self.who} {event}'.strip())
    def before_step(self): self.hear('before_step')
    def after_step(self): self.hear('after_step')
    def after_cancel_step(self): self.hear('after_cancel_step')

class Own(Hears):
    "Decides for itself"
    def __call__(self, event): self.hear(f'__call__ {event}')

class Learn:
    "What the table wants of a Learner: callbacks, and, in validation, a call"
    def __init__(self, *cbs, training=True):
        self.cbs,self.training,self.sent = L(cbs),training,[]
        for cb in cbs: cb.learn = self
    def __call__(self, event): self.sent.append(event)

def new(name, **kwargs): return type(name, (Callback,), kwargs)()
def who(loop, event): return [cb for cb,*_ in loop.table[event]]

def loop_of(learn, condition=None):
    "A loop that calls the methods in its table; what `rows` decides is not wanted here"
    loop = BatchLoop(learn)
    loop.events = EventTable(learn, condition or (lambda *_: None))
    return loop

def test_is_a():
    class Mine(Recorder): pass
    assert is_a(Mine, 'Other', 'Recorder') and not is_a(Mine, 'Other') and not is_a(Callback, 'Recorder')

@pytest.mark.parametrize('module', ['wandb', 'tensorboard', 'comet', 'neptune', 'azureml'])
def test_loggers_of_fastai(module):
    """One row for each step, and none for a validation; it does not read the prediction. A subclass of one is one, a class
    of its name is not"""
    def after_batch(self): pass
    theirs = type('Logger', (Callback,), dict(__module__=f'fastai.callback.{module}', after_batch=after_batch))
    for cls,expected in ((theirs, True), (type('Mine', (theirs,), {}), True), (type('TensorBoardCallback', (Callback,), {}), False)):
        assert [declares(cls(), what) for what in ('takes_rows', 'opens_rows', 'repeats_rows', 'writes')] == [expected]*4
        assert not declares(cls(), 'rows_of_steps_only')
    assert not _may_read_pred(theirs())

def test_callbacks_of_fastai():
    "What is declared of them, by a module or by a class in it, holds for subclasses, and not for a class that has but the name"
    from fastai.callback import fp16, hook, progress
    from fastai.vision import gan
    told = dict(takes_rows=[gan.GANTrainer, gan.FixedGANSwitcher, gan.GANDiscriminativeLR], opens_rows=[gan.GANDiscriminativeLR],
                writes=[progress.CSVLogger, progress.ProgressCallback, progress.ShowGraphCallback], ends_autocast=[fp16.MixedPrecision],
                reads_hooks=[hook.ActivationStats, hook.HookCallback])
    classes = {*sum(told.values(), [])}
    for what,known in told.items():
        for cls in classes:
            assert is_known(cls, what) == is_known(type('Mine', (cls,), {}), what) == (cls in known)
            assert not is_known(type(cls.__name__, (Callback,), {}), what)

def test_with_context():
    e = with_context(ValueError('bad', 'more'), Hears(), 'after_step')
    assert e.args==('Exception occured in `Hears` when calling event `after_step`:\n\tbad',)
    assert with_context(e := ValueError(), Hears(), 'after_step') is e and e.args==()

def test_order():
    "By `order`; those of one order as they stand in the list"
    log = []
    a,b,c = (Hears(log, w, o) for w,o in (('a', 5), ('b', 5), ('c', -1)))
    table = loop_of(Learn(a, b, c))
    table.fire('after_step')
    assert log==['c after_step', 'a after_step', 'b after_step']
    assert who(table, 'after_step')==[c, a, b] and who(table, 'after_batch')==who(table, 'after_loss')==[]

def test_methods_of_objects():
    "Also what an object alone has; what is in `unused_events`, of the class or of the object, is left out"
    calls = []
    cb = Hears(calls, after_loss=lambda: calls.append('mine'))
    class Less(Hears): unused_events = 'before_step','after_step'
    less,least = Less(calls),Less(calls, unused_events=('after_cancel_step',))
    table = loop_of(Learn(cb, less, least))
    table.fire('after_loss')
    assert calls==['mine'] and who(table, 'after_step')==[cb, least] and who(table, 'after_cancel_step')==[cb, less]

def test_run():
    "`run`, `run_train`, and who decides for itself; `after_cancel_step` is for all that run, as in fastai"
    log = []
    cbs = [cls(log, f'{cls.__name__} {run} {train}', run=run, run_train=train)
           for cls in (Hears, Own) for run in (True, False) for train in (True, False)]
    table = loop_of(Learn(*cbs))
    own = [f'Own {run} {train} __call__ ' for run in (True, False) for train in (True, False)]
    for event,expected in (('after_step', ['Hears True True']), ('after_cancel_step', ['Hears True True', 'Hears True False'])):
        table.fire(event)
        assert log==[f'{w} {event}' for w in expected]+[o+event for o in own]
        log.clear()

def test_condition():
    "Asked for once for each callback and event, and then each time"
    log,asked,answers = [],[],[True, False, True]
    cb = Hears(log)
    table = loop_of(Learn(cb), lambda *args: (asked.append(args), (lambda: answers.pop()) if args[1]=='after_step' else None)[1])
    for _ in range(3): table.fire('after_step')
    table.fire('before_step')
    assert log==['after_step', 'after_step', 'before_step'] and not answers
    assert sorted(ev for _,ev in asked)==['after_cancel_step', 'after_step', 'before_step'] and {c for c,_ in asked}=={cb}

def test_slots():
    "By the class; not while it does not run"
    a,p = new('A', slot='accumulation', running=True),new('P', slot='precision', after_pred=noop)
    other = Hears(slot='accumulation')           # of an object it says nothing
    finder,mix = LRFinder(),type('Mine', (MixHandler,), {})()
    learn = Learn(other, a, p, finder, mix)
    table = loop_of(learn)
    assert (table.accumulation, table.precision, table.lr_finder)==(a, p, finder)
    assert table.table['mixers']==[mix]
    class Mixes(Callback):                       # another library's: known by what it keeps
        def before_batch(self): self.lam,self.yb1 = .5,self.y
    class Reads(Callback):
        def before_batch(self): return self.lam
    mixes = Mixes()
    learn.cbs = L(mix, Reads(), mixes, a, p)
    assert [cb for cb in table.table['mixers'] if cb in (mix, mixes)]==[mix, mixes]    # with `Reads`: it may mix, too
    a.run = False
    assert table.accumulation is table.every_batch and table.precision is p
    a.run,a.running = True,False                 # added in mid-batch: it starts with the next one
    assert table.accumulation is table.every_batch
    learn.cbs = L(other)
    assert (table.accumulation is table.every_batch and table.precision is table.as_it_is and table.lr_finder is None
            and table.table['mixers']==[])

def test_after_pred():
    "Where only the precision listens, nobody needs to be called"
    p,other = new('P', slot='precision', after_pred=noop),new('O', after_pred=noop)
    for cbs,expected in (([p], []), ([p, other], [p, other]), ([other], [other]), ([Hears()], [])):
        assert who(loop_of(Learn(*cbs)), 'after_pred')==expected

def test_backward():
    "All that listen around the backward pass"
    cbs = [new(ev, **{ev: noop}) for ev in ('after_backward', 'before_backward', 'after_cancel_backward', 'after_loss')]
    assert {*who(loop_of(Learn(*cbs)), 'backward')}=={*cbs[:3]}

def test_reads_pred():
    "Whoever listens to `after_batch`, but for those that are known not to read it"
    class Quiet(Recorder): pass
    class Loud(Recorder):
        def after_batch(self): pass
    quiet = Recorder()
    assert not _may_read_pred(quiet) and not _may_read_pred(Quiet()) and _may_read_pred(Loud())
    quiet.after_batch = noop
    assert _may_read_pred(quiet)
    says_no = new('N', after_batch=noop, reads_pred=False)
    for cb,expected in ((Recorder(), False), (quiet, True), (Loud(), True), (says_no, False), (Hears(), False), (Own(), True)):
        assert loop_of(Learn(cb)).table['reads_pred'] is expected
    assert loop_of(Learn(Loud(), says_no)).table['reads_pred'] is True

def test_up_to_date():
    "The table follows the list: at the next event, and after one that changed it. What is not changed stays"
    learn = Learn(a := Hears([], 'a'))
    table = loop_of(learn)
    first = table.table['after_step']
    assert table.table['after_step'] is first
    learn.cbs.append(b := Hears(a.log, 'b', 1, before_step=lambda: learn.cbs.remove(b)))
    table.fire('after_step')
    assert a.log==['a after_step', 'b after_step'] and len(first)==1       # another event may be going through the old list
    table.fire('before_step')
    assert who(table, 'after_step')==[a]

@pytest.mark.parametrize('cls', (Hears, Own))
def test_errors(cls):
    "A cancel passes; an error says where it comes from, but for one of a callback that decides for itself"
    def fail(e):
        def f(*_): raise e
        cb = type('Fails', (cls,), {'__call__' if cls is Own else 'after_step': f})(log := [])
        table = loop_of(Learn(cb, Hears(log, order=1)))
        with pytest.raises(type(e)) as info: table.fire('after_step')
        assert not log
        return info.value.args
    assert fail(CancelBatchException('why'))==('why',)
    assert fail(ValueError('bad'))==(('bad',) if cls is Own else ('Exception occured in `Fails` when calling event `after_step`:\n\tbad',))

def test_fire():
    "In training through the table, in validation as fastai does; TensorBoard does not write the last row again"
    log = []
    cbs = Hears(log),type('Board', (Hears,), dict(repeats_rows=True, after_batch=lambda self: self.hear('after_batch')))(log, 'board')
    events = loop_of(learn := Learn(*cbs))
    events.fire('before_step')
    assert log==['before_step', 'board before_step'] and not learn.sent
    learn.training = False
    for ev in ('before_step', 'after_batch'): events.fire(ev)
    assert learn.sent==['before_step', 'after_batch'] and len(log)==2
    a = type('A', (Hears,), dict(slot='accumulation', after_batch=lambda self: self.hear('after_batch')))(log, 'a', -1)
    b = type('B', (Hears,), dict(after_batch=lambda self: (self.hear('after_batch'), learn.cbs.remove(self))))(log, 'b', -2)
    a.learn = b.learn = learn
    learn.cbs += [a, b]
    events.fire('before_step'), events.fire('after_batch')
    assert learn.sent==['before_step', 'after_batch', 'before_step'] and log[2:]==['b after_batch', 'a after_batch']
    assert len(events.table['after_step'])==3    # up to date

def test_around():
    "Before, the work, what cancels it, and after in any case; another exception ends it. Nobody is called where nobody listens"
    log = []
    events = loop_of(Learn(Hears(log)))
    def work(e=None):
        def f():
            log.append('work')
            if e: raise e
        return f
    events.around(work(), 'step', CancelStepException)
    assert log==['before_step', 'work', 'after_step']
    log.clear()
    events.around(work(CancelStepException()), 'step', CancelStepException)
    assert log==['before_step', 'work', 'after_cancel_step', 'after_step']
    log.clear()
    with pytest.raises(CancelFitException): events.around(work(CancelFitException()), 'step', CancelStepException)
    assert log==['before_step', 'work']
    sent = []
    events.fire = sent.append
    events.around(noop, 'batch', CancelBatchException), events.around(noop, 'backward', CancelBackwardException)
    assert not sent
    events.learn.cbs.append(type('Both', (Callback,), dict.fromkeys(('after_batch', 'before_backward'), noop))())
    events.around(noop, 'batch', CancelBatchException), events.around(noop, 'backward', CancelBackwardException)
    assert sent==['after_batch', 'before_backward']
