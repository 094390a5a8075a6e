import "../base/digits.plt"

model {
  network = [linear(8), relu(), linear(4)]
}
data {
  source = python("entropies:unseeded_in_part") #! E0655
}
devices {
  cpus = 2
}
