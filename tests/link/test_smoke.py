from tests.helpers.pair import Pair
import time
def test_smoke(pair: Pair) -> None:
    t=time.time()
    for n in range(10): pair.run(200, 0, (64, 128))
    print("10 runs", time.time()-t)
    pair.run(200, 32)
def test_w(workshop) -> None:
    p=workshop.pair(); p.run(); p.idle()
