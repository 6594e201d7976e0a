"A text classifier that is killed and started again is the run that nobody interrupted; a language model is refused, and told what to write"
import pytest
from fastai.callback.tracker import SaveModelCallback
from fastai.text.all import (
    AWD_LSTM, LMDataLoader, awd_lstm_clas_config, awd_lstm_lm_config, language_model_learner, pad_input,
    text_classifier_learner)
from reference import *
from test_checkpoint import Interrupt, new_process, one_process, weights
from test_transforms import of_texts
from fastaccum.checkpoint.callback import TrainingCheckpoint

def lstm_runs_in_bf16():
    "oneDNN has such LSTMs for some CPUs only"
    try:
        with torch.autocast('cpu', torch.bfloat16): nn.LSTM(4, 4)(torch.randn(2, 1, 4))
    except RuntimeError: return False
    return True

small = dict(emb_sz=4, n_hid=5, n_layers=2)

def made(learner, *args, cbs, **kwargs):
    learn = learner(*args, AWD_LSTM, pretrained=False, path=Path('.'), cbs=cbs, **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def classifier(*cbs, acc=(), precision=noop, stop=None):
    "Its first fit has 3 batches, with frozen LSTMs"
    set_seed(0)
    learn = made(text_classifier_learner, of_texts(before_batch=pad_input), seq_len=5,
                 config=dict(awd_lstm_clas_config, **small), cbs=[*cbs, *[c() for c in acc]])
    precision(learn)
    def fits(): learn.fine_tune(2, .01)
    if stop is None: fits(); return learn
    learn.add_cb(Interrupt(stop))
    with pytest.raises(RuntimeError, match='interrupted'): fits()
    new_process()

@pytest.mark.parametrize('how', [pytest.param(dict(), marks=pytest.mark.slow),
                                 pytest.param(dict(acc=[partial(GradientAccumulation, 8, micro_batch_size=3)], precision=Learner.to_bf16),
                                              marks=pytest.mark.skipif(not lstm_runs_in_bf16(), reason='no LSTM in bfloat16 on this CPU'))],
                         ids=['plain', 'bf16 in parts'])
def test_classifier(how):
    whole = classifier(**how)
    for stop in (0, 1),(1, 2): classifier(TrainingCheckpoint(every_steps=1), stop=stop, **how)
    again = classifier(TrainingCheckpoint(every_steps=1), **how)
    assert (torch.equal(weights(again.model), weights(whole.model))
            and torch.equal(torch.stack(again.recorder.losses), torch.stack(whole.recorder.losses)))
    assert [list(v) for v in again.recorder.values] == [list(v) for v in whole.recorder.values] and again.opt.hypers == whole.opt.hypers

def language(*cbs):
    set_seed(0)
    dls = DataLoaders(
        *[LMDataLoader([tensor([(i*j)%11 for j in range(30)]) for i in range(1, 5)], bs=2, seq_len=5, shuffle=s,
                       num_workers=0) for s in (True, False)], path=Path('.'))
    dls.vocab = [str(i) for i in range(11)]
    return made(language_model_learner, dls, config=dict(awd_lstm_lm_config, **small), cbs=cbs)

def test_language_model():
    "What the error says to write trains the rest"
    learn = language(TrainingCheckpoint())
    says = r"keeps state from one batch to the next.*SaveModelCallback\(every_epoch=True, with_opt=True\).*`start_epoch=4`"
    with pytest.raises(ValueError, match=says): learn.fit(1)
    def fit(learn, *cbs, **kwargs): learn.fit_one_cycle(3, .01, cbs=[SaveModelCallback(every_epoch=True, with_opt=True), *cbs], **kwargs)
    with pytest.raises(RuntimeError): fit(language(), Interrupt((1, 2), event='after_batch'))
    saved,learn = language(),language()
    saved.load('model_0'); learn.load('model_0')
    class Begins(Callback):
        def before_train(self):
            self.learn.begun = [*getattr(self.learn, 'begun', []),
                                (self.epoch, weights(self.model), self.opt.hypers[0]['lr'])]
    fit(learn, Begins(), start_epoch=1)
    assert [e for e,*_ in learn.begun] == [1, 2] and torch.equal(learn.begun[0][1], weights(saved.model))
