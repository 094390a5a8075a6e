import "../base/digits.plt"

model {
  network = [linear(8), relu(), linear(4)]
}
data {
  source = python("entropies:by_clock") #! W0656
}
devices {
  cpus = 1
}
