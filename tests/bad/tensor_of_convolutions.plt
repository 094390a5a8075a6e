import "base/digits.plt"

model {
  network = convnet(channels = [8])
}

parallelism {
  tensor = 2 #! E0416
}
