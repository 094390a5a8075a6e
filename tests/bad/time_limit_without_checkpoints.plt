import "base/digits.plt"

launch {
  with = slurm(time = 2h) #! W0815
}
