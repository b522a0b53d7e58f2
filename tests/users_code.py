"""Modules of a user's own, right and wrong ones, as texts: networks and data sets."""

NETS = """
from collections import OrderedDict
from pathlib import Path
from torch import nn

Path({marker!r}).touch()

class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)

def build(channels, size, classes):
    body = nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, 8), nn.ReLU())
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(8, classes)))

def real(channels, size, classes):
    model = build(channels, size, classes)
    assert model.head.weight.sum().isfinite()
    return model

def bare(channels, size, classes):
    layers = dict(first=nn.Conv2d(channels, 2, 1), flat=nn.Flatten(), head=nn.Linear(2 * size**2, classes))
    return nn.Sequential(OrderedDict(layers))

def mixing(channels, size, classes):
    return nn.Sequential(OrderedDict(centre=Centred(), **dict(build(channels, size, classes).named_children())))

def module(channels, size, classes):
    return nn.Linear(channels, classes)

def narrow(channels, size, classes):
    return build(channels, size, classes + 1)

def fails(channels, size, classes):
    raise ValueError("no such size")

def other(width):
    return None

def batchwise(channels, size, classes):
    return nn.Sequential(OrderedDict(soft=nn.Softmax(dim=0), **dict(build(channels, size, classes).named_children())))

def twice(channels, size, classes):
    act = nn.ReLU()
    layers = dict(flat=nn.Flatten(), one=nn.Linear(size**2, 8), act=act, two=nn.Linear(8, 8), again=act)
    return nn.Sequential(OrderedDict(**layers, head=nn.Linear(8, classes)))

def inplace(channels, size, classes):
    body = nn.Sequential(nn.Flatten(), nn.Linear(size**2, 8))
    return nn.Sequential(OrderedDict(body=body, act=nn.ReLU(inplace=True), head=nn.Linear(8, classes)))

class Sub(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + 5

def sub(channels, size, classes):
    return Sub(*build(channels, size, classes))

constant = 3

def key(channels, size, classes):
    return {{}}["resnet"]

def exits(channels, size, classes):
    raise SystemExit(3)

def deep(channels, size, classes):
    return deep(channels, size, classes)

def changed(channels, size, classes, **layers):
    return nn.Sequential(OrderedDict(**dict(build(channels, size, classes).named_children()), **layers))

class Dictionary(nn.Module):
    def forward(self, x):
        return {{"logits": x}}

class InTraining(nn.Module):
    def forward(self, x):
        return (x, x) if self.training else x

class Late(nn.Module):
    def forward(self, x):
        if len(x) > 2:
            raise KeyError("/data/patient-7")
        return x

class Leaving(nn.Module):
    def forward(self, x):
        if len(x) > 2:
            raise SystemExit(4)
        return x

class Spare(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.spare = nn.Parameter(self.bias.detach().clone())

def dictionary(channels, size, classes):
    return changed(channels, size, classes, last=Dictionary())

def in_training(channels, size, classes):
    return changed(channels, size, classes, last=InTraining())

def late(channels, size, classes):
    return changed(channels, size, classes, last=Late())

def leaving(channels, size, classes):
    return changed(channels, size, classes, last=Leaving())

def frozen(channels, size, classes):
    return build(channels, size, classes).requires_grad_(False)

def partly(channels, size, classes):
    body = build(channels, size, classes)[0].requires_grad_(False)
    return nn.Sequential(OrderedDict(body=body, spare=Spare(8, 8), head=nn.Linear(8, classes)))

def normed(channels, size, classes):
    return nn.Sequential(OrderedDict(flat=nn.Flatten(), norm=nn.BatchNorm1d(size**2), head=nn.Linear(size**2, classes)))

def tied(channels, size, classes):
    one, two = nn.Linear(size**2, size**2), nn.Linear(size**2, size**2)
    two.weight = one.weight
    return nn.Sequential(OrderedDict(flat=nn.Flatten(), one=one, two=two, head=nn.Linear(size**2, classes)))
"""
BROKEN = """
import nothing_of_this_name
"""
DATA = """
import numpy as np
import torch

x, y = np.arange(6 * 64, dtype=np.uint8).reshape(6, 8, 8), np.array([0, 1, 2, 0, 1, 2])

class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return torch.tensor(x[index])[None], int(y[index])

def arrays(data_dir):
    return {"train": (x, y), "test": (x[:3], y[:3]), "val": (x[3:], y[3:])}

def whole(data_dir):
    return {"all": (x, y)}

def last(data_dir):
    return {"all": (np.stack([x, x, x], axis=3), y)}

def torchs(data_dir):
    return {"train": Pairs(), "test": Pairs()}

def hugging(data_dir):
    from datasets import Dataset
    from PIL import Image
    rows = Dataset.from_dict({"image": [Image.fromarray(image) for image in x], "label": y.tolist()})
    return {"train": rows, "test": rows}

def names(data_dir):
    return {"training": (x, y)}

def fails(data_dir):
    raise OSError(f"nothing in {data_dir}")

def unlabelled(data_dir):
    return {"train": [{"picture": 1}], "test": [{"picture": 1}]}

class Lacking(Pairs):
    def __getitem__(self, index):
        return self.images[index]

def lacking(data_dir):
    return {"train": Lacking(), "test": Lacking()}

def leaves(data_dir):
    raise SystemExit("no data")

def words(data_dir):
    return {"all": (np.array([["one"]] * 6), y)}
"""
NAMES = "build bare mixing module narrow fails other constant buidl batchwise twice sub key exits deep dictionary"
NAMES += " in_training late leaving frozen partly normed tied real inplace"
DATA_NAMES = "arrays whole last torchs hugging names fails unlabelled lacking leaves words"
ALL = " ".join([*(f"ownnets:{name}" for name in NAMES.split()), *(f"owndata:{name}" for name in DATA_NAMES.split())])
ALL += " nonesuch:build ownfolder:build ownbroken:build"
