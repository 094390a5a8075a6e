import base.plt
import base
