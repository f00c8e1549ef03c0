"""units"""
def judge_units(name, arrays): return [], ["todo"]
