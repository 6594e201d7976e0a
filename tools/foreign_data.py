"""What fastai's notebooks load from the network, made here in seconds: data sets in fastai's layouts, "pretrained" nets with seeded weights

`offline()` puts them in the place of `untar_data` and of the weights, for the process that runs a notebook. Labels can be learned."""
import os, socket
from pathlib import Path
import numpy as np, pandas as pd
from PIL import Image

def picture(fn, rng, label=0, size=(48,40), mode='RGB'):
    "Noise, brighter the higher its label"
    fn.parent.mkdir(parents=True, exist_ok=True)
    noise = rng.integers(0, 120, (*size[::-1], 3)) + 12*(label%10)
    Image.fromarray(noise.astype(np.uint8)).convert(mode).save(fn)

def folders(path, rng, counts, labels, ext, **kwargs):
    "`path/part/label/number.ext`, as many of each label as `counts` says for the part"
    for part,n in counts.items():
        for i,label in enumerate(labels):
            for j in range(n): picture(path/part/label/f'{j}.{ext}', rng, i, **kwargs)

def pets(path, rng):
    breeds = 'Abyssinian Bengal Birman Bombay beagle boxer pug samoyed'.split()
    for i in range(112): picture(path/'images'/f'{breeds[i%8]}_{i//8}.jpg', rng, i%8)

def mnist_tiny(path, rng, n=40):
    folders(path, rng, dict(train=n, valid=n//2), '37', 'png', size=(28,28), mode='L')
    for j in range(10): picture(path/'test'/f'{j}.png', rng, size=(28,28), mode='L')

def mnist_sample(path, rng): mnist_tiny(path, rng, 80)

def camvid_tiny(path, rng):
    np.savetxt(path/'codes.txt', 'Animal Building Road Sky Void'.split(), fmt='%s')
    for i in range(100):
        picture(path/'images'/f'{i:03}.png', rng, i%5)
        (path/'labels').mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 5, (40,48)).astype(np.uint8)).save(path/'labels'/f'{i:03}_P.png')

def pascal_2007(path, rng):
    classes,rows = 'car dog person tree'.split(),[]
    for i in range(100):
        has = [c for j,c in enumerate(classes) if i>>j & 1] or ['car']
        picture(path/'train'/f'{i:06}.jpg', rng, len(has))
        rows.append((f'{i:06}.jpg', ' '.join(has), i%5==0))
    pd.DataFrame(rows, columns=['fname', 'labels', 'is_valid']).to_csv(path/'train.csv', index=False)

def imagenette(path, rng):
    ids = 'n01440764 n02102040 n02979186 n03000684 n03028079 n03394916 n03417042 n03425413 n03445777 n03888257'.split()
    folders(path, rng, dict(train=7, val=2), ids, 'JPEG')

def bedroom(path, rng): folders(path, rng, dict(train=48), ['0'], 'jpg', size=(64,64))

def adult_sample(path, rng, n=10_200):
    def pick(*names): return rng.choice(names, n)
    df = pd.DataFrame({
        'age': rng.integers(17, 90, n), 'workclass': pick(' Private', ' State-gov', ' ?'), 'fnlwgt': rng.integers(20_000, 400_000, n),
        'education': pick(' Bachelors', ' HS-grad', ' Masters'), 'education-num': rng.integers(1, 17, n).astype(float),
        'marital-status': pick(' Divorced', ' Never-married'), 'occupation': pick(' Sales', ' Tech-support', ' ?'),
        'relationship': pick(' Husband', ' Wife', ' Unmarried'), 'race': pick(' White', ' Black', ' Other'),
        'sex': pick(' Male', ' Female'),
        'capital-gain': rng.integers(0, 9999, n), 'capital-loss': rng.integers(0, 999, n), 'hours-per-week': rng.integers(1, 99, n),
        'native-country': pick(' Cuba', ' United-States')})
    df['salary'] = np.where(df['age'] + rng.normal(0, 9, n) > 50, '>=50k', '<50k')
    df.loc[rng.choice(n, 150, replace=False), 'education-num'] = np.nan
    df.to_csv(path/'adult.csv', index=False)

def ratings(rng, n, users, movies):
    user,movie = rng.integers(1, users+1, n),rng.integers(1, movies+1, n)
    user[:users],movie[:movies] = np.arange(1, users+1),np.arange(1, movies+1)
    return pd.DataFrame(dict(userId=user, movieId=movie, rating=(1 + (user+movie)%9/2), timestamp=rng.integers(8e8, 9e8, n)))

def movie_lens_sample(path, rng): ratings(rng, 1000, 40, 60).to_csv(path/'ratings.csv', index=False)

def movie_lens(path, rng):
    df = ratings(rng, 2000, 80, 100)
    df.assign(rating=df.rating.astype(int)).to_csv(path/'u.data', sep='\t', header=False, index=False)
    pd.DataFrame([(i, f'Film {i} (1990)') for i in range(1, 101)]).to_csv(path/'u.item', sep='|', header=False, index=False)

WORDS = ('the a this that movie film story actor scene music end plot and but with of in was is has very quite never always saw liked '
         'thought time people great bad').split()

def text(rng, label, n=None):
    n = n or rng.integers(15, 60)
    words = rng.choice(WORDS, n)
    words[::5] = ('awful', 'wonderful')[label]
    return ' '.join(words).capitalize() + '.'

def imdb_sample(path, rng):
    rows = [(('negative', 'positive')[i%2], text(rng, i%2), i%5==0) for i in range(200)]
    pd.DataFrame(rows, columns=['label', 'text', 'is_valid']).to_csv(path/'texts.csv', index=False)

def imdb(path, rng):
    for part in ('train', 'test'):
        for i in range(80):
            fn = path/part/('neg', 'pos')[i%2]/f'{i}.txt'
            fn.parent.mkdir(parents=True, exist_ok=True)
            fn.write_text(text(rng, i%2))

def wikitext(path, rng):
    for part,n in (('train', 80), ('test', 20)):
        pd.DataFrame([f' = Title {i} = \n {text(rng, i%2, 200)}' for i in range(n)]).to_csv(path/f'{part}.csv', header=False, index=False)

def text_weights(path, rng):
    for fn in ('lstm.pth', 'itos.pkl'): (path/fn).touch()

# The name of the archive -> what makes its contents in a folder
MAKERS = {'oxford-iiit-pet': pets, 'mnist_tiny': mnist_tiny, 'mnist_sample': mnist_sample, 'camvid_tiny': camvid_tiny,
          'pascal_2007': pascal_2007, 'imagenette2-160': imagenette, 'bedroom': bedroom, 'adult_sample': adult_sample,
          'movie_lens_sample': movie_lens_sample, 'ml-100k': movie_lens, 'imdb_sample': imdb_sample, 'imdb': imdb, 'wikitext-2': wikitext,
          'wt103-fwd': text_weights, 'wt103-bwd': text_weights}

class NoData(Exception): "A notebook asks for data that nothing here makes"

def make(url, root):
    "The folder with the data of this address"
    name = Path(url).name.split('.')[0]
    if name not in MAKERS: raise NoData(name)
    path = Path(root)/name
    if not path.exists():
        path.mkdir(parents=True)
        MAKERS[name](path, np.random.default_rng(0))
    return path

def seeded_weights(self, *args, **kwargs):
    "In the place of a download: the weights that the net gets from the random numbers at hand"
    from torchvision import models
    name = next(o for o in models.list_models() if models.get_model_weights(o) is type(self))
    return models.get_model(name, weights=None).state_dict()

def offline(root):
    "No network, no worker processes and a small AWD_LSTM in this process; on a machine without a GPU `.cuda()` stays on the CPU"
    import fastai.data.external, fastai.data.load, torch, torchvision
    fastai.data.external.untar_data = lambda url, *args, **kwargs: make(url, root)  # before other modules import it
    from fastai.text.learner import TextLearner
    from fastai.text.models.awdlstm import awd_lstm_clas_config, awd_lstm_lm_config
    for config in (awd_lstm_clas_config, awd_lstm_lm_config): config.update(emb_sz=32, n_hid=48, n_layers=2)
    torchvision.models._api.WeightsEnum.get_state_dict = seeded_weights
    TextLearner.load_pretrained = lambda self, *args, **kwargs: self
    init,connect = fastai.data.load._FakeLoader.__init__,socket.socket.connect
    def no_workers(self, d, pin_memory, num_workers, *args, **kwargs):
        init(self, d, pin_memory, 0, *args, **{**kwargs, 'persistent_workers': False})
    def local(self, address):
        if self.family!=getattr(socket, 'AF_UNIX', None) and address[0] not in ('127.0.0.1', '::1', 'localhost'):
            raise ConnectionError('the notebooks run without network')
        return connect(self, address)
    fastai.data.load._FakeLoader.__init__,socket.socket.connect = no_workers,local
    if not torch.cuda.is_available():
        torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
        fastai.data.core.DataLoaders.cuda = lambda self: self
