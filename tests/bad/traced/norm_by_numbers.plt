import "../base/vectors.plt"

model {
  network = python("../../helpers/own_forward_passes:SkippedNorms", how = "torch") #! W0326 E0644
}
