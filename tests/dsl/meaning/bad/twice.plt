import "base/good.plt"
language = 1
language = 2 #! E0104 E0112

param width = 1 #! W0101
param width = 2 #! E0104

train {
  seed = 1
}

train {
  clip  = 1.0
  seed  = 2 #! E0104
  steps = 5
}

devices {
  gpus = 2
  cpus = 2 #! E0105
}

parallelism = auto

parallelism {
  data = 2 #! E0105
}
