import "base/good.plt"

train = 3 #! E0113

train {
  clip = 1.0
}

expect {
  memory < 76GiB #! E0140
  peak_memory < 3 #! E0124
  bubble < 2GiB #! E0122
  devices = 2 #! E0113
}

sweep {
  train.optimizer.lr = [0.1, -1, 2MB] #! E0125 E0122
  train.optimzer.lr  = [0.1] #! E0142
  rate               = 0.1 #! E0142
  data.batch         = [] #! E0142
}
