#: rate=-1
#: train.optimizer.mometum=0.9
#: model.network.layers=3
#: rat=1
#: data.batch=64,
#: evaluate.every=5
#: expect.bubble<3
#: expect.bubble=3%
#: launch.with.partition=gpu
#: devices.gpus.count=3
#: train.steps.x.y=3
import "base/good.plt"

memory {
  recompute = none
}
