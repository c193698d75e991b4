"""Names of peers that people can say, computed from their ids."""

import hashlib


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MOODS = _words(
    """
    able agile alert amused ardent bold brave brisk calm candid careful cheerful clever content
    cordial curious daring decent earnest eager fair fearless fond frank friendly gentle glad
    graceful happy hardy helpful honest hopeful humble jolly jovial keen kind lively loyal lucid
    merry mild modest neat nimble noble patient placid polite proud prudent quick quiet sincere
    steady sunny tender tidy trusty upbeat vivid warm witty
    """
)

LOOKS = _words(
    """
    amber ashen azure beige black blond blue bronze brown chrome cobalt copper coral cream
    crimson cyan dappled dusky ebony emerald fawn flaxen frosted gilded golden granite green
    grey hazel indigo ivory jade khaki lilac lime maroon mauve mossy navy ochre olive opal
    orange pale pearly pink plum purple red rosy ruby russet rusty sable saffron sandy scarlet
    silver speckled striped tawny teal violet white
    """
)

ANIMALS = _words(
    """
    alpaca antelope badger beaver bison bobcat buffalo camel caribou cheetah cobra condor cougar
    coyote crane dingo dolphin donkey eagle egret falcon ferret finch fox gazelle gecko gibbon
    heron hyena ibex iguana impala jackal jaguar koala lemur leopard llama lynx macaw magpie
    marmot marten meerkat moose newt ocelot orca osprey otter owl panda panther pelican puffin
    puma rabbit raven salmon seal stork tapir walrus wombat
    """
)


def memorable_name(peer_id: str) -> str:
    """Returns the readable name of a peer, computed from its id alone.

    >>> memorable_name("12D3KooW9pNAk8aiBuGVQtWRdbkLmo5qVL3e2h5UxbN2Nz9ttwiw")
    'graceful-copper-puma'
    """
    digest = hashlib.blake2b(peer_id.encode(), digest_size=3, person=b"swarmnode-name").digest()
    words = (MOODS, LOOKS, ANIMALS)
    return "-".join(choices[byte % len(choices)] for choices, byte in zip(words, digest, strict=True))
