# A grid: nine short trainings one after another, each in a sub-folder of the run directory. `dslc check` checks all nine.
import "digits.plt"

train {
  epochs = 1
}

sweep {
  train.optimizer.lr = [0.01, 0.03, 0.1]
  data.batch         = [32, 64, 128]
}
