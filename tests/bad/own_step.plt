import "base/digits.plt"

parallelism {
  microbatches = 2 #! E0620
}

train {
  step = python("gan:step") #! W0620
}
